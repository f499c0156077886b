"""SIGUSR2 writes down what every thread does, even of a process that hangs, and the process lives
on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from phasetrain.runtime.signals import stacks_on_signal

HANG = """
import sys, threading, time
from phasetrain.runtime.signals import stacks_on_signal

def hang_in_a_thread():
    time.sleep(60)

def hang_in_the_main_thread():
    print("hanging", flush=True)
    time.sleep(float(sys.argv[2]))

threading.Thread(target=hang_in_a_thread, daemon=True).start()
with stacks_on_signal(sys.argv[1]):
    hang_in_the_main_thread()
print("alive", flush=True)
"""


def test_stacks_of_a_process_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    process = subprocess.Popen(
        [sys.executable, "-c", HANG, str(path), "0.7"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGUSR2)
        end = time.monotonic() + 10
        while "hang_in_the_main_thread" not in path.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        assert process.poll() is None
        assert "hang_in_the_main_thread" in path.read_text()
        assert "hang_in_a_thread" in path.read_text()
        found, errors = process.communicate(timeout=20)
        assert (found, errors, process.returncode) == ("alive\n", "", 0)
        assert path.exists()
    finally:
        process.kill()
        process.communicate()


def test_a_file_that_stayed_empty_goes(tmp_path: Path) -> None:
    with stacks_on_signal(f"{tmp_path}/stacks.txt"):
        assert (tmp_path / "stacks.txt").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_attempt_wrote_stays(tmp_path: Path) -> None:
    (tmp_path / "stacks.txt").write_text("earlier\n")
    with stacks_on_signal(f"{tmp_path}/stacks.txt"):
        signal.raise_signal(signal.SIGUSR2)
    text = (tmp_path / "stacks.txt").read_text()
    assert text.startswith("earlier\n")
    assert "test_what_an_earlier_attempt_wrote_stays" in text


def test_a_file_that_somebody_has_cleared_away_is_fine(tmp_path: Path) -> None:
    with stacks_on_signal(f"{tmp_path}/stacks.txt"):
        (tmp_path / "stacks.txt").unlink()
    assert list(tmp_path.iterdir()) == []
