"""The watchdog writes down a stall once, and nothing of a run that moves."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import train
from raising import raises

from phasetrain.addons.observe.watchdog import Watchdog
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook

SLEEPY = "HOOKS.watchdog={seconds: 0.8}"


class Sleeper(Hook):
    """Hangs for `seconds` in the steps that complete the updates `at`."""

    def __init__(self, seconds: float, *at: int) -> None:
        self.seconds, self.at = seconds, at

    def on_update(self, run: Any, phase: Any) -> None:
        if run.state.updates in self.at:
            time.sleep(self.seconds)


def warnings(folder: Path) -> int:
    return (folder / "log.txt").read_text().count("no step has completed in 0.8 s")


def test_stall_is_recorded_once_and_the_run_finishes(tmp_path: Path) -> None:
    result = train(tmp_path, "PHASES.epochs=1", SLEEPY, hooks={"sleeper": Sleeper(1.2, 2)})
    assert result.state == "finished"
    text = (tmp_path / "stacks.txt").read_text()
    assert text.startswith("Timeout (0:00:00.8")
    assert "in on_update" in text
    assert text.count("Timeout") == 1
    assert warnings(tmp_path) == 1


@pytest.mark.slow
def test_each_stall_has_its_own(tmp_path: Path) -> None:
    train(tmp_path, "PHASES.epochs=1", SLEEPY, hooks={"sleeper": Sleeper(1.6, 1, 3)})
    assert (tmp_path / "stacks.txt").read_text().count("Timeout") == 2
    assert warnings(tmp_path) == 2


def test_run_that_makes_progress_leaves_no_stacks_and_no_thread(tmp_path: Path) -> None:
    words = ("PHASES.epochs=1", "HOOKS.watchdog={seconds: 0.8}")
    train(tmp_path, *words, hooks={"sleeper": Sleeper(0.2, *range(6))})  # longer than that in all
    assert [thread.name for thread in threading.enumerate() if "watchdog" in thread.name] == []
    assert "no step has completed" not in (tmp_path / "log.txt").read_text()
    time.sleep(0.9)
    assert not (tmp_path / "stacks.txt").exists()


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seconds = 0"):
        Watchdog(seconds=0)
    with raises(ConfigError, code="config.duplicate_hook"):
        train(tmp_path, SLEEPY, "HOOKS.second={name: watchdog}")
    assert HOOKS["watchdog"] is Watchdog
