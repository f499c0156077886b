"""A resume within a phase names the observing hooks that have lost what they collected in it."""

import logging
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, SaveEachStep, run_until_killed, train

from phasetrain.hooks import Hook

SEEN: list[int] = []


class Collect(Hook):
    """Collects samples of a test, as a user would write it."""

    observe_only = True
    written: list[int] = []

    def on_phase_start(self, run: Any, phase: Any) -> None:
        self.rows: list[int] = []

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        if phase.split == "test":
            self.add(out.ids.tolist())

    def add(self, rows: list[int]) -> None:
        self.rows += rows

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        if phase.split == "test":
            Collect.written = self.rows


class Saved(Collect):
    """Collects them exactly, as in docs/cookbook/runs.md."""

    def __init__(self) -> None:
        self.rows = []

    def on_phase_start(self, run: Any, phase: Any) -> None:
        pass

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        super().on_phase_end(run, phase, metrics)
        self.rows = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Shared(Hook):
    """Collects in a variable of its module."""

    observe_only = True

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        SEEN.append(run.state.updates)

    def on_metrics(self, run: Any, phase: Any, metrics: dict[str, float]) -> None:
        metrics["steps"] = len(SEEN)
        SEEN.clear()


class Prints(Hook):
    """Keeps nothing from one step to the next."""

    observe_only = True

    def __init__(self) -> None:
        self.every = 100

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        self.show(run.state.updates, phase.split)

    def show(self, updates: int, text: str) -> None:
        if updates % self.every == 0:
            logging.info(text)

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        self.show(run.state.updates, phase.split)


@pytest.mark.feature(
    "hooks.lost_rows",
    "a resume within a phase names observing hooks that have lost what they collected in it",
    "`HOOKS`",
)
@pytest.mark.parametrize(
    ("hook", "steps", "lost", "rows"),
    [
        (Collect, 6, "rows", 32),
        (Saved, 6, "", 64),
        (Shared, 6, "SEEN", None),
        (Prints, 6, "", None),
        (Collect, 5, "", 64),  # the test begins again
    ],
)
def test_resume_within_a_phase_names_what_hooks_have_lost(
    tmp_path: Path, hook: type[Hook], steps: int, lost: str, rows: int | None
) -> None:
    SEEN.clear()
    short = "PHASES.epochs=1"
    run_until_killed(
        tmp_path,
        short,
        hooks={"mine": hook(), "save": SaveEachStep(), "kill": KillAfter(steps)},
    )
    assert "HOOKS.mine" not in (tmp_path / "log.txt").read_text()
    SEEN.clear()
    train(tmp_path, short, hooks={"mine": hook()})
    log = (tmp_path / "log.txt").read_text()
    assert log.count("HOOKS.mine: the run resumes within phase test of epoch 1") == bool(lost)
    assert log.count(f"end of the phase ({lost}) is lost") == bool(lost)
    if rows is not None:
        assert len(Collect.written) == rows
