"""Ends a run whose metric has stopped getting better (hook `early_stopping`)."""

from collections.abc import Mapping
from typing import Any

from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.monitor import AUTO, Monitor, Patience


@HOOKS.register("early_stopping")
class EarlyStopping(Hook):
    """Stops the run for good when the metric was not better than its best for `patience`
    measurements in a row.

    Best value and patience spent are saved, so a resumed run stops where an unbroken one would.
    Stages of a run share them.

    Args:
        monitor: `split/metric`, such as `test/accuracy`; with a minus sign before it smaller is
            better: `-test/loss`; `auto` is the first metric of the first test split.
        patience: measurements in a row that may bring nothing.
        min_delta: by how much a value has to be better to count.
    """

    def __init__(self, monitor: str = AUTO, patience: int = 3, min_delta: float = 0.0) -> None:
        self.monitor = Monitor(monitor, "HOOKS.early_stopping.monitor")
        self.patience = Patience(patience, min_delta)

    def on_start(self, run: Run) -> None:
        """See that the metric will be measured."""
        self.monitor = self.monitor.checked(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Compare with the best value so far."""
        if phase.split == self.monitor.split and self.patience.hear(
            self.monitor.found(phase, metrics)
        ):
            best = self.patience.best
            spent = self.patience.spent
            told = "a number" if best is None else f"better than {self.monitor.score(best):g}"
            run.stop(f"early stopping: {self.monitor.metric} was not {told} {spent} times in a row")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, so that more is better, and the patience spent."""
        return self.patience.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.patience.load_state_dict(state)
