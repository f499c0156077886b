"""Lowers the learning rate when a metric has stopped improving (hook `plateau`)."""

import logging
from collections.abc import Mapping
from typing import Any

from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.monitors.monitor import AUTO, Monitor, Patience

log = logging.getLogger(__name__)


@HOOKS.register("plateau")
class Plateau(Hook):
    """Multiplies all learning rates by `factor` when the metric was not better than its best
    `patience` times in a row.

    The factor applies on top of the schedules, from the next update on. The product of all
    reductions is state of the updater (`Updater.factor`), the best value and the counters are state
    of the hook, so a resumed run lowers the rate at the same update as an uninterrupted one.
    torch.optim.lr_scheduler.ReduceLROnPlateau with `patience=n` does the same as `patience: n + 1`
    here.

    Args:
        monitor: `split/metric`, such as `valid/accuracy`, or `-valid/loss` with a minus sign if
            smaller is better; `auto` is the first metric of the validation split, else
            of the first test split.
        factor: factor of one reduction, above 0 and below 1.
        patience: number of consecutive measurements without improvement.
        min_delta: minimum improvement that counts.
        cooldown: measurements after a reduction that do not count against the patience.
        min_factor: lower bound of the product of all reductions.

    Raises:
        ValueError: a parameter out of its range.
    """

    main_only = False  # every rank has an optimizer whose rates have to be lowered

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
        check_at_least(0, cooldown=cooldown)
        check_below_one(min_factor=min_factor)
        self.monitor = Monitor(monitor, "HOOKS.plateau.monitor")
        self.factor = factor
        self.cooldown = cooldown
        self.min_factor = min_factor
        self.patience = Patience(patience, min_delta)
        self.resting = 0

    def on_start(self, run: Run) -> None:
        """Check that the metric will be measured."""
        self.monitor = self.monitor.resolve(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Compare the metric with its best value.

        All ranks use the value of rank 0: averages over ranks may differ in the last bit, and ranks
        with different learning rates would diverge.
        """
        if phase.split != self.monitor.objective.split:
            return
        score = run.world.broadcast(self.monitor.read_score(phase, metrics))
        # Also during the cooldown, so that the best value stays up to date.
        has_run_out = self.patience.add_score(score)
        if self.resting:
            self.resting -= 1
            self.patience.spent = 0
        elif has_run_out:
            self.resting = self.cooldown
            self.patience.spent = 0
            self._reduce_rates(run)

    def _reduce_rates(self, run: Run) -> None:
        updater = run.task.updater
        reduced = max(self.min_factor, updater.factor * self.factor)
        if reduced >= updater.factor:
            return
        log.info(
            "plateau: %s was not better %d times in a row; learning rates are multiplied by %g "
            "from here on (was %g)",
            self.monitor.objective.metric,
            self.patience.patience,
            reduced,
            updater.factor,
        )
        updater.factor = reduced

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and the counters."""
        return {**self.patience.state_dict(), "resting": self.resting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.patience.load_state_dict(state)
        self.resting = int(state["resting"])
