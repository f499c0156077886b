"""A request to stop is heard while the run waits for data that does not come."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import SMALL, leftovers, newest, parted, train

STALLING = """
import os, time
from pathlib import Path
from phasetrain.data import DATASETS
from phasetrain.data.datasets.digits import digits


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
    return Stalling(digits(split=split))
"""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_in_a_data_stall(tmp_path: Path, workers: int) -> None:
    (tmp_path / "stalling.py").write_text(STALLING)
    (tmp_path / "stall").touch()
    words = [*SMALL, "RUN.imports=[stalling]", "DATA.TRAIN.dataset=stalling", "PHASES.limit.train=null"]
    words += [f"DATA.TRAIN.workers={workers}", f"RUN.dir={tmp_path}/run"]
    command = [sys.executable, "-m", "phasetrain", *words]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **options)  # type: ignore[call-overload]
    end = time.monotonic() + 60
    while not (tmp_path / "stalls").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1.0)  # what was prefetched is used up
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, time.monotonic() - began < 20) == (143, True), output
    assert "stopped by SIGTERM" in output
    assert newest(tmp_path / "run").manifest.facts.why == "signal"
    assert leftovers(tmp_path / "run") == []
    (tmp_path / "stall").unlink()
    again = subprocess.run(command, check=False, timeout=120, **options)  # type: ignore[call-overload]
    assert again.returncode == 0, again.stdout
    train(tmp_path / "unbroken", "PHASES.limit.train=null")
    assert parted(tmp_path / "unbroken", tmp_path / "run") == []


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


def test_sigterm_while_the_loader_holds_a_lock(tmp_path: Path) -> None:
    """Raised there, the request would leave the lock taken, and the end of the workers would wait for it for ever."""
    (tmp_path / "in_a_lock.py").write_text(IN_A_LOCK)
    words = [*SMALL, "RUN.imports=[in_a_lock]", "DATA.TRAIN.workers=1", f"RUN.dir={tmp_path}/run"]
    command = [sys.executable, "-m", "phasetrain", *words]
    ended = subprocess.run(command, cwd=tmp_path, check=False, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 143, ended.stdout + ended.stderr
    assert "stopped by SIGTERM" in ended.stdout
