"""SIGTERM stops a run that waits for data that does not come."""

import os
import signal
import time
from pathlib import Path

import pytest
from faulty import ONE, Starter
from harness import SMALL, differences_of_runs, is_clean, newest, train

STALLING = """
import os, time
from pathlib import Path
from phasetrain.data import DATASETS
from phasetrain.data.datasets.digits import load_digits


class Stalling:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if index == 200 and Path("stall").exists():
            Path("stalls").touch()
            time.sleep(3600)
        return self.inner[index]

    def facts(self):
        return self.inner.facts()

    def fingerprint(self):
        return self.inner.fingerprint()


@DATASETS.register("stalling")
def stalling(split: str):
    return Stalling(load_digits(split=split))
"""


LARGE = ("PHASES.epochs=1", "PHASES.limit.train=null", "DATA.TRAIN.batch_size=120")
"""Every sample is read, in 12 updates."""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_in_a_data_stall_saves_and_resumes_exactly(
    starter: Starter, tmp_path: Path, workers: int
) -> None:
    (tmp_path / "stalling.py").write_text(STALLING)
    (tmp_path / "stall").touch()
    words = (
        *SMALL,
        ONE,
        "experiment=digits",
        "RUN.imports=[stalling]",
        "DATA.TRAIN.dataset=stalling",
        *LARGE,
    )
    words += (f"DATA.TRAIN.workers={workers}",)
    pid = starter.start(tmp_path / "run", *words)
    end = time.monotonic() + 60
    while not (tmp_path / "stalls").exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(1.0 if workers else 0.1)  # what was prefetched is used up
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    ended = starter.wait()
    assert (ended.code, time.monotonic() - began < 20) == (143, True), ended.output
    assert newest(tmp_path / "run").manifest.facts.why == "signal"
    assert is_clean(ended, tmp_path / "run")
    (tmp_path / "stall").unlink()
    again = starter.run(tmp_path / "run", *words)
    assert again.code == 0, again.output
    train(tmp_path / "unbroken", ONE, *LARGE)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


IN_A_LOCK = """
import os, signal, sys, threading, time

leave = threading.Condition.__exit__
sent = []


def send_within(self, *error):
    caller = sys._getframe(1)
    inside = caller.f_code.co_name == "put" and caller.f_code.co_filename.endswith("queues.py")
    if inside and not sent and threading.current_thread() is threading.main_thread():
        sent.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    return leave(self, *error)


threading.Condition.__exit__ = send_within
"""


def test_sigterm_while_the_loader_holds_a_lock_ends_the_run(
    starter: Starter, tmp_path: Path
) -> None:
    """An exception raised there would leave the lock taken, and the shutdown of the workers would
    wait for it forever."""
    (tmp_path / "in_a_lock.py").write_text(IN_A_LOCK)
    ended = starter.run(
        tmp_path / "run", *SMALL, ONE, "RUN.imports=[in_a_lock]", "DATA.TRAIN.workers=1"
    )
    assert ended.code == 143, ended.output
    assert is_clean(ended, tmp_path / "run")
