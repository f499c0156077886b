"""A hook that logs numbers where no step takes them causes a warning."""

from pathlib import Path
from typing import Any

import pytest
from harness import train
from torch import nn

import phasetrain
from phasetrain.hooks import Hook


class Noting(nn.Module):
    """A module that logs, as a part of a model does."""

    def forward(self) -> None:
        phasetrain.log("noted", 1.0)


class Logging(Hook):
    """Logs a number in each event of a phase."""

    observe_only = True

    def on_phase_start(self, *args: Any) -> None:
        phasetrain.log("phase_start", 1.0)

    def on_step_start(self, *args: Any) -> None:
        phasetrain.log("step_start", 1.0)

    def on_batch(self, *args: Any) -> None:
        phasetrain.log("batch", 1.0)

    def on_update(self, *args: Any) -> None:
        phasetrain.log("update", 1.0)

    def on_step(self, *args: Any) -> None:
        phasetrain.log("step", 1.0)

    def on_metrics(self, *args: Any) -> None:
        phasetrain.log("metrics", 1.0)

    def on_phase_end(self, *args: Any) -> None:
        phasetrain.log("phase_end", 1.0)


class Calling(Hook):
    """Calls a module that logs, for an evaluation of its own."""

    observe_only = True

    def on_phase_end(self, *args: Any) -> None:
        Noting()()


def list_events(folder: Path) -> list[str]:
    """Return the events that warnings name, in order."""
    lines = [
        line
        for line in (folder / "log.txt").read_text().splitlines()
        if "phasetrain.log gets in" in line
    ]
    return [line.split("gets in ")[1].split(" is lost")[0] for line in lines]


@pytest.mark.feature(
    "log.dropped",
    "a number that a hook logs where no step takes it is warned of, once for each event",
    "`phasetrain.log`",
)
def test_each_event_without_a_step_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = train(tmp_path, "PHASES.epochs=2", hooks={"logs": Logging()})
    assert list_events(tmp_path) == [
        *("on_phase_start", "on_step_start", "on_step", "on_metrics", "on_phase_end")
    ]
    assert {"train/batch", "train/update"} <= result.last.keys()
    caplog.clear()
    phasetrain.log("after", 1.0)
    assert not caplog.messages


def test_module_that_a_hook_calls_may_log(tmp_path: Path) -> None:
    train(tmp_path, "PHASES.epochs=1", hooks={"calls": Calling()})
    assert list_events(tmp_path) == []
