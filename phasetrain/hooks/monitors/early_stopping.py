"""Ends a run when its metric has stopped improving (hook `early_stopping`)."""

from collections.abc import Mapping
from typing import Any

from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.monitors.monitor import AUTO, Monitor, Patience


@HOOKS.register("early_stopping")
class EarlyStopping(Hook):
    """Finishes the run when the metric was not better than its best for `patience` measurements in
    a row.

    Best value and patience spent are part of the checkpoint, so a resumed run stops at the same
    measurement as an uninterrupted one. All stages of a run share them.

    Args:
        monitor: `split/metric`, such as `valid/accuracy`, or `-valid/loss` with a minus sign if
            smaller is better; `auto` is the first metric of the validation split, else
            of the first test split.
        patience: number of consecutive measurements without improvement.
        min_delta: minimum improvement that counts.
    """

    def __init__(self, monitor: str = AUTO, patience: int = 3, min_delta: float = 0.0) -> None:
        self.monitor = Monitor(monitor, "HOOKS.early_stopping.monitor")
        self.patience = Patience(patience, min_delta)

    def on_start(self, run: Run) -> None:
        """Check that the metric will be measured."""
        self.monitor = self.monitor.resolve(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Compare the metric with its best value."""
        objective = self.monitor.objective
        if phase.split != objective.split:
            return
        if not self.patience.add_score(self.monitor.read_score(phase, metrics)):
            return
        best = self.patience.best
        if best is None:
            expected = "a number"
        else:
            # a negated score is the value again
            expected = f"better than {objective.direction.score(best):g}"
        times = self.patience.spent
        # Called on rank 0 alone; the consensus of the run stops all ranks at the same step.
        run.stop(f"early stopping: {objective.metric} was not {expected} {times} times in a row")

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and the patience spent."""
        return self.patience.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.patience.load_state_dict(state)
