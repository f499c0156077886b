"""When a run is saved, and that a checkpoint which does not fit the run is refused in words."""

from pathlib import Path
from typing import Any

import pytest
from harness import train

from phasetrain.hooks import Hook


class Saves(Hook):
    """Notes every position at which a checkpoint is written."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_save(self, run: Any) -> None:
        state = run.state
        self.seen.append(
            f"{state.phase}.{state.step} {state.updates}{' end' * bool(state.finished)}"
        )


def saves(folder: Path, *words: str) -> list[str]:
    watch = Saves()
    train(folder, *words, hooks={"watch": watch})
    return watch.seen


@pytest.mark.feature(
    "86-89",
    "saves by interval, at the end, on exceptions, signals and request; in the background",
    "`CHECKPOINT`",
)
@pytest.mark.by_default("words1-seen1", "words3-seen3", "words4-seen4", "words5-seen5")
@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ((), ["1.0 5", "3.0 10", "5.0 15", "6.0 15 end"]),
        (("CHECKPOINT.every_epochs=2",), ["3.0 10", "6.0 15 end"]),
        (("CHECKPOINT.every_epochs=null",), ["6.0 15 end"]),
        (("CHECKPOINT.every_epochs=null", "CHECKPOINT.at_end=false"), []),
        (
            ("CHECKPOINT.every_epochs=null", "CHECKPOINT.every_updates=4"),
            ["0.4 4", "2.3 8", "4.2 12", "6.0 15 end"],
        ),
        (
            ("CHECKPOINT.every_epochs=2", "CHECKPOINT.keep_every={updates: 6, epochs: 3}"),
            ["2.1 6", "3.0 10", "4.2 12", "5.0 15", "6.0 15 end"],
        ),
        (("CHECKPOINT.every_updates=5", "PHASES.epochs=1"), ["0.5 5", "1.0 5", "2.0 5 end"]),
        (
            ("CHECKPOINT.every_epochs=1", "PHASES.test_every.updates=3", "PHASES.epochs=1"),
            ["3.0 5", "4.0 5 end"],
        ),
        (("PHASES.epochs=0",), ["0.0 0 end"]),
    ],
)
def test_checkpoints_are_saved_when_configured(
    tmp_path: Path, words: tuple[str, ...], seen: list[str]
) -> None:
    assert saves(tmp_path, *words) == seen


@pytest.mark.feature("35", "save and load events", "`on_save`, `on_load`")
def test_hooks_speak_before_their_state_is_saved(tmp_path: Path) -> None:
    class Late(Hook):
        value = 0

        def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
            self.value += 1

        def on_save(self, run: Any) -> None:
            seen.append(self.value)

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

    seen: list[int] = []
    train(tmp_path, "PHASES.epochs=1", hooks={"late": Late()})
    assert seen == [1, 2]
