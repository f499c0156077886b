"""Launches the runs that are judged as forks of the test, which need not import torch again."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from phasetrain.addons.experiments.judge import facts
from phasetrain.addons.experiments.judge.contenders import FACTS
from phasetrain.addons.experiments.judge.processes import WorkingFolder
from phasetrain.cli import main


def launch_fork(words: Sequence[str], working_folder: WorkingFolder, output: Path) -> int:
    """Run a module in a fork, and return the exit code as a shell counts it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(working_folder.path)
            sys.path[:0] = working_folder.search_path
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stderr = sys.stdout = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            torch.set_num_threads(1)  # a pool of threads does not live on in a fork
            code = facts.main(words[1:]) if words[0] == FACTS else main(list(words[1:]))
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code
