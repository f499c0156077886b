"""Runs the attempts of a certificate as forks of the test, which need not import torch again."""

import os
import sys
from pathlib import Path

import torch

from phasetrain.addons.experiments.certify import attempt


def launch_fork(order: Path, output: Path) -> int:
    """Run an order in a fork, and return its exit code as a shell counts it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stderr = sys.stdout = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            torch.set_num_threads(1)  # a pool of threads does not live on in a fork
            code = attempt.main([str(order)])
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code
