"""What a run reads and leaves at each step, as digests that can be compared with those of another
run."""

from collections.abc import Mapping
from typing import Any

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.testing.compare import digests

Place = tuple[int, int]
"""Phases completed, and steps completed in the current one."""


class Trace(Hook):
    """Takes digests of batches, losses, metrics and of every state, under the position that they
    lead to.

    The state of hooks that the framework brings along is left out: log positions differ between
    equal runs.

    Attributes:
        moments: position -> path -> digest; batches first, then losses and metrics, then states.
        restored: the position that was resumed, and the state of the task then; None in a first
            attempt.
        plan: the plan of the run.
    """

    main_only = False

    def __init__(self) -> None:
        self.moments: dict[Place, dict[str, str]] = {}
        self.restored: tuple[Place, dict[str, str]] | None = None
        self.plan: Plan | None = None
        self._batches: dict[str, str] = {}

    def on_start(self, run: Run) -> None:
        """Keep the plan."""
        self.plan = run.plan

    def on_load(self, run: Run) -> None:
        """Take the state that was restored."""
        self.restored = _place(run), _learned(run)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Forget what was read for a step that is not made."""
        self._batches = {}

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Take a micro-batch as the other hooks leave it."""
        content = {
            "ids": batch.ids,
            "input": batch.input,
            "target": batch.target,
            "mask": batch.mask,
        }
        self._batches |= digests(content, f"batch.{len(self._batches) // len(content)}")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Take loss and states after a step."""
        said = digests(out.loss, "loss") | digests(out.logs, "logs")
        self.moments[_place(run)] = self._batches | said | _learned(run) | _watched(run)
        self._batches = {}

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Take metrics and states after a phase."""
        self.moments[_place(run)] = (
            digests(dict(metrics), "metrics") | _learned(run) | _watched(run)
        )

    def on_end(self, run: Run) -> None:
        """Take the states at the end, after the last word of every hook."""
        self.moments[_place(run)] = (
            self.moments.get(_place(run), {}) | _learned(run) | _watched(run)
        )


def _place(run: Run) -> Place:
    return run.state.phase, run.state.step


def _learned(run: Run) -> dict[str, str]:
    parts = {name: part.state_dict() for name, part in run.task.stateful().items()}
    return digests(parts, "state")


def _watched(run: Run) -> dict[str, str]:
    """Return digests of the states of hooks that are not the framework's own."""
    own = {"checkpoint", "latest"} | {
        label for label, hook in run.hooks.by_label.items() if type(hook) in _brought()
    }
    others = {label: hook for label, hook in run.hooks.by_label.items() if label not in own}
    return digests(
        {label: state for label, hook in others.items() if (state := hook.state_dict())}, "hooks"
    )


def _brought() -> set[Any]:
    return {kind for kind in HOOKS.values() if kind.__module__.startswith("phasetrain.hooks.")}
