"""The interfaces through which the engine uses tasks and hooks."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import Position


class PhaseTask(Protocol):
    """A task as the engine uses it; see `phasetrain.tasks.Task`."""

    def begin(self, phase: Phase, *, fresh: bool) -> None:
        """Prepare for a phase; `fresh` if none of its steps is complete."""
        ...

    def begin_epoch(self, phase: Phase) -> None:
        """Prepare for the next pass over the training data."""
        ...

    def batches(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of a phase, from step `start` on."""
        ...

    def replan(self, plan: Plan) -> None:
        """Take the batches of later phases from another plan, equal up to the current position."""
        ...

    def train_step(self, batches: list[Batch], at: Position, events: Any) -> StepOutput:
        """Make one update from the micro-batches of a step."""
        ...

    def skip_step(self, at: Position, events: Any) -> StepOutput:
        """Make no update in a step that has no samples."""
        ...

    def test_step(self, batches: list[Batch], at: Position, events: Any) -> StepOutput:
        """Evaluate the micro-batches of a step."""
        ...

    def add_logs(self, out: StepOutput, logs: Mapping[str, Any]) -> None:
        """Add numbers that other code has logged during a step to its output."""
        ...

    def measure(self, phase: Phase) -> dict[str, float]:
        """Return the metrics of a phase by label."""
        ...

    def close(self) -> None:
        """Release the resources of the task."""
        ...


class EngineHooks(Protocol):
    """The hooks of a run as the engine calls them; see `phasetrain.hooks.Hooks`.

    Attributes:
        has_step_start: whether a hook has the event `on_step_start`.
    """

    has_step_start: bool

    def events(self, run: Any, phase: Phase) -> Any:
        """Return the events within the steps of a phase."""
        ...

    def on_start(self, run: Any) -> None:
        """Call the hooks at the start of the run."""
        ...

    def on_load(self, run: Any) -> None:
        """Call the hooks after a checkpoint was restored."""
        ...

    def on_phase_start(self, run: Any, phase: Phase) -> None:
        """Call the hooks at the start of a phase."""
        ...

    def on_step_start(self, run: Any, phase: Phase) -> None:
        """Call the hooks before the data of a step is fetched."""
        ...

    def on_step(self, run: Any, phase: Phase, out: StepOutput) -> None:
        """Call the hooks after a complete step."""
        ...

    def on_phase_end(self, run: Any, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Call the hooks after a complete phase."""
        ...

    def on_end(self, run: Any) -> None:
        """Call the hooks at the end of the run."""
        ...

    def on_exception(self, run: Any, error: BaseException) -> None:
        """Call the hooks after an exception."""
        ...

    def close(self) -> None:
        """Release the resources of the hooks."""
        ...
