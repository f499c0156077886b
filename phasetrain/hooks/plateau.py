"""Lowers the learning rate where a metric has stopped getting better (hook `plateau`)."""

import logging
from collections.abc import Mapping
from typing import Any

from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.monitor import AUTO, Monitor, Patience

log = logging.getLogger(__name__)


@HOOKS.register("plateau")
class Plateau(Hook):
    """Multiplies all learning rates by `factor` when the metric was not better than its best
    `patience` times in a row.

    It multiplies what the schedules give, from the next update on. The product of all reductions is
    state of the updater (`Updater.factor`), the best value and what was counted are state of the
    hook, so a resumed run lowers it where an unbroken one does.
    torch.optim.lr_scheduler.ReduceLROnPlateau with `patience=n` does the same as `patience: n + 1`
    here.

    Args:
        monitor: `split/metric`, such as `test/accuracy`; with a minus sign before it smaller is
            better: `-test/loss`; `auto` is the first metric of the first test split.
        factor: of one reduction, above 0 and below 1.
        patience: measurements in a row that may bring nothing.
        min_delta: by how much a value has to be better to count.
        cooldown: measurements after a reduction that do not count against the patience.
        min_factor: the product of all reductions does not go below this.

    Raises:
        ValueError: a parameter out of its range.
    """

    main_only = False

    def __init__(
        self,
        monitor: str = AUTO,
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
        cooldown: int = 0,
        min_factor: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor = {factor}: expected a number above 0 and below 1")
        if cooldown < 0:
            raise ValueError(f"cooldown = {cooldown}: expected at least 0")
        if not 0 <= min_factor < 1:
            raise ValueError(f"min_factor = {min_factor}: expected at least 0 and below 1")
        self.monitor = Monitor(monitor, "HOOKS.plateau.monitor")
        self.factor = factor
        self.cooldown = cooldown
        self.min_factor = min_factor
        self.patience = Patience(patience, min_delta)
        self.resting = 0

    def on_start(self, run: Run) -> None:
        """See that the metric will be measured."""
        self.monitor = self.monitor.checked(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Compare with the best value so far; all processes go by what the main one has
        measured."""
        if phase.split != self.monitor.split:
            return
        ended = self.patience.hear(run.world.broadcast(self.monitor.found(phase, metrics)))
        if self.resting:
            self.resting, self.patience.spent = self.resting - 1, 0
        elif ended:
            self.resting = self.cooldown
            self.patience.spent = 0
            self._reduce(run)

    def _reduce(self, run: Run) -> None:
        updater = run.task.updater
        lowered = max(self.min_factor, updater.factor * self.factor)
        if lowered >= updater.factor:
            return
        text = "plateau: %s was not better %d times in a row; learning rates are multiplied by %g from here on (was %g)"
        log.info(text, self.monitor.metric, self.patience.patience, lowered, updater.factor)
        updater.factor = lowered

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, so that more is better, and what was counted."""
        return {**self.patience.state_dict(), "resting": self.resting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.patience.load_state_dict(state)
        self.resting = int(state["resting"])
