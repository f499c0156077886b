"""A fault of the device of one rank, for tests of rechecks."""

from typing import Any

from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run


@HOOKS.register("disturb")
class Disturb(Hook):
    """Doubles the gradient of the last layer on one rank in one update, before ranks exchange it.

    Args:
        rank: rank whose device is faulty.
        update: number of the update.
    """

    main_only = False
    observe_only = True

    def __init__(self, rank: int, update: int) -> None:
        self.rank = rank
        self.update = update
        self._handle: Any = None

    def on_step_start(self, run: Run, phase: Phase) -> None:
        if (run.world.rank, run.state.updates) == (self.rank, self.update - 1) and phase.is_train:
            bias = list(run.task.parts.model.parameters())[-1]
            self._handle = bias.register_hook(lambda gradient: gradient * 2)

    def on_update(self, run: Run, phase: Phase) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
