"""Ends a run whose metric has stopped getting better (hook `early_stopping`)."""

import logging
from collections.abc import Mapping
from typing import Any

from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.monitor import Monitor
from phasetrain.plan import Phase

log = logging.getLogger(__name__)


@HOOKS.register("early_stopping")
class EarlyStopping(Hook):
    """Stops the run for good when the metric was not better than its best for `patience` measurements in a row.

    Best value and patience spent are saved, so a resumed run stops where an unbroken one would.

    Args:
        monitor: `split/metric`, such as `test/accuracy`; with a minus sign before it smaller is better: `-test/loss`.
        patience: measurements in a row that may bring nothing.
        min_delta: by how much a value has to be better to count.
    """

    def __init__(self, monitor: str, patience: int = 3, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience = {patience}: expected at least 1")
        if min_delta < 0:
            raise ValueError(f"min_delta = {min_delta}: expected at least 0")
        self.monitor = Monitor(monitor, "HOOKS.early_stopping.monitor")
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.spent = 0

    def on_start(self, run: Run) -> None:
        """See that the metric will be measured."""
        self.monitor.check(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Compare with the best value so far."""
        name = self.monitor.metric.partition("/")[2]
        if phase.split != self.monitor.metric.partition("/")[0]:
            return
        if name not in metrics:
            raise ConfigError(
                f"{self.monitor.where} = {self.monitor.name!r}: the phase has measured {', '.join(metrics)} and not it"
            )
        score = self.monitor.found(phase, metrics)
        if score is not None and (self.best is None or score > self.best + self.min_delta):
            self.best, self.spent = score, 0
            return
        self.spent += 1
        if self.spent >= self.patience:
            best = "a number" if self.best is None else f"better than {self.monitor.score(self.best):g}"
            run.stop(f"early stopping: {self.monitor.metric} was not {best} {self.spent} times in a row")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, so that more is better, and the patience spent."""
        return {"best": self.best, "spent": self.spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.best, self.spent = state["best"], int(state["spent"])
