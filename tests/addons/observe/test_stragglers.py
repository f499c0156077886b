"""What each process needs for itself is told apart from its waits; runs of several are in
test_faults_processes.py."""

from pathlib import Path

import pytest
from harness import train

from phasetrain.addons.observe.stragglers import StepSeconds, Stragglers, own_seconds
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS


class TestOwn:
    def test_own_time_without_waits_is_the_step_time(self) -> None:
        assert own_seconds(
            [StepSeconds(0.5, 2.0), StepSeconds(0.25, 2.0), StepSeconds(0.5, 6.0)]
        ) == [2.5, 2.25, 6.5]

    def test_a_wait_for_the_last_batch_is_taken_off(self) -> None:
        """Process 0 gets its batch 4 s after the others, which wait for its buffers in their
        forward passes."""
        assert own_seconds(
            [StepSeconds(4.0, 1.0), StepSeconds(0.0, 5.0), StepSeconds(0.0, 5.0)]
        ) == [5.0, 1.0, 1.0]

    def test_a_late_batch_for_which_nobody_waits(self) -> None:
        assert own_seconds(
            [StepSeconds(0.0, 1.0), StepSeconds(0.0, 1.0), StepSeconds(4.0, 1.0)]
        ) == [1.0, 1.0, 5.0]


def test_single_rank_reports_no_straggler(tmp_path: Path) -> None:
    train(tmp_path, "PHASES.epochs=1", "HOOKS.stragglers={every_updates: 1, milliseconds: 0}")
    assert "slows down all others" not in (tmp_path / "log.txt").read_text()


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every_updates = 0"):
        train(tmp_path, "HOOKS.stragglers={every_updates: 0}")
    with pytest.raises(ValueError, match=r"ratio = 1\.0"):
        Stragglers(ratio=1.0)
    assert HOOKS["stragglers"] is Stragglers
