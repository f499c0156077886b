"""Records digests of the batches, losses and states of each step, to compare two runs."""

from collections.abc import Mapping
from typing import Any

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.runtime.compare import digest_leaves

Place = tuple[int, int]
"""Number of completed phases, and of completed steps in the current one."""


class Trace(Hook):
    """Records digests of batches, losses, metrics and states, by the position after the step.

    Attributes:
        moments: position -> path -> digest; batches first, then losses and metrics, then states.
        restored: the position of a resume, and the state of the task at it; None in a first
            attempt.
        plan: the plan of the run.
    """

    main_only = False  # each rank reads other batches
    observe_only = True

    def __init__(self) -> None:
        self.moments: dict[Place, dict[str, str]] = {}
        self.restored: tuple[Place, dict[str, str]] | None = None
        self.plan: Plan | None = None
        self._batches: dict[str, str] = {}

    def on_start(self, run: Run) -> None:
        """Keep the plan."""
        self.plan = run.plan

    def on_load(self, run: Run) -> None:
        """Record the restored state."""
        self.restored = _position(run), _digest_task(run)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Forget the batches of a step that was not completed."""
        self._batches = {}

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Record a micro-batch, after other hooks have changed it."""
        content = {
            "ids": batch.ids,
            "input": batch.input,
            "target": batch.target,
            "mask": batch.mask,
        }
        # Copied to digests at once: the step may change the tensors in place.
        self._batches |= digest_leaves(content, f"batch.{len(self._batches) // len(content)}")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the loss and states after a step."""
        outputs = digest_leaves(out.loss, "loss") | digest_leaves(out.logs, "logs")
        self.moments[_position(run)] = (
            self._batches | outputs | _digest_task(run) | _digest_hooks(run)
        )
        self._batches = {}

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record metrics and states after a phase."""
        self.moments[_position(run)] = (
            digest_leaves(dict(metrics), "metrics") | _digest_task(run) | _digest_hooks(run)
        )

    def on_end(self, run: Run) -> None:
        """Record the states at the end, after the `on_end` of all other hooks."""
        self.moments[_position(run)] = (
            self.moments.get(_position(run), {}) | _digest_task(run) | _digest_hooks(run)
        )


def _position(run: Run) -> Place:
    return run.state.phase, run.state.step


def _digest_task(run: Run) -> dict[str, str]:
    parts = {name: part.state_dict() for name, part in run.task.stateful().items()}
    return digest_leaves(parts, "state")


def _digest_hooks(run: Run) -> dict[str, str]:
    """Return digests of the states of custom hooks."""
    # Built-in hooks store offsets in log files, which differ between otherwise equal runs.
    builtin = _builtin_hooks()
    states: dict[str, Any] = {}
    for label, hook in run.hooks.by_label.items():
        if label in ("checkpoint", "latest") or type(hook) in builtin:
            continue
        state = hook.state_dict()
        if state:
            states[label] = state
    return digest_leaves(states, "hooks")


def _builtin_hooks() -> set[Any]:
    return {kind for kind in HOOKS.values() if kind.__module__.startswith("phasetrain.hooks.")}
