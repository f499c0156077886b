"""Signals that children get, their exit codes, and the environment of ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phasetrain.runtime.child_processes import (
    convert_exit_code,
    forward_signals,
    handle_signals,
    make_rank_environment,
)


@pytest.mark.parametrize(
    ("ignored", "heard"), [(False, [signal.SIGHUP, signal.SIGTERM]), (True, [signal.SIGTERM])]
)
def test_signals_that_stop_a_run_are_handled(ignored: bool, heard: list[int]) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with handle_signals(lambda number, frame: received.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == heard


def test_signals_are_passed_on_to_children(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", code])]
    while not ready.exists():
        time.sleep(0.01)
    with forward_signals(children, [signal.SIGUSR1]) as received:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert convert_exit_code(children[0].wait(30)) == 128 + signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGTERM)  # the child has ended
    assert received == [signal.SIGUSR1, signal.SIGTERM]


@pytest.mark.parametrize(("code", "shell"), [(0, 0), (3, 3), (-9, 137)])
def test_exit_codes_are_those_of_a_shell(code: int, shell: int) -> None:
    assert convert_exit_code(code) == shell


@pytest.mark.parametrize(("inherited", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "4"}, "4")])
def test_environment_of_a_rank(inherited: dict[str, str], threads: str) -> None:
    environment = make_rank_environment(
        {**inherited, "RANK": "7"}, rank=1, size=4, local_rank=1, nodes=2, address="a", port=5
    )
    assert environment == {
        "OMP_NUM_THREADS": threads,
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "5",
    }
