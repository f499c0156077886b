"""Warns of a process that all others wait for in every step (hook `stragglers`)."""

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """What a process needs for its own part of a step.

    Attributes:
        data: median seconds from the end of a step to the next batch.
        forward: median seconds from there to the end of the last forward pass.
    """

    data: float
    forward: float


@HOOKS.register("stragglers")
class Stragglers(Hook):
    """Compares how long each process takes for its own part of a step, and names those that hold
    the others up.

    Processes wait for each other in the backward pass and the update; what each needs for itself is
    the time from the end of a step to the end of the next one's last forward pass. Costs three
    looks at the clock per step, and an exchange of a few numbers per comparison.

    Args:
        every_updates: how often they are compared.
        ratio: how many times the median of all a process takes before it is told of.
        milliseconds: how much longer than the median it has to take.
        repeat_updates: after how many updates a process may be told of again.
    """

    observe_only = True
    main_only = False
    single = True
    distributed_only = True

    def __init__(
        self,
        every_updates: int = 50,
        ratio: float = 1.5,
        milliseconds: float = 5.0,
        repeat_updates: int = 1000,
    ) -> None:
        if every_updates < 1 or repeat_updates < 1:
            raise ValueError(
                f"every_updates = {every_updates} and repeat_updates = {repeat_updates}: expected at least 1"
            )
        if ratio <= 1 or milliseconds < 0:
            raise ValueError(
                f"ratio = {ratio} and milliseconds = {milliseconds}: expected a ratio above 1 and milliseconds from 0"
            )
        self.every_updates = every_updates
        self.ratio = ratio
        self.repeat_updates = repeat_updates
        self._seconds = milliseconds / 1000
        self._hosts: list[str] | None = None
        self._told: dict[int, int] = {}
        self._data: list[float] = []
        self._forward: list[float] = []
        self._ended = self._began = self._computed = 0.0

    def on_start(self, run: Run) -> None:
        """Hear where the processes are."""
        self._hosts = run.world.gather(socket.gethostname())

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """What lies between phases is no part of a step."""
        self._ended = 0.0

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Note when the first batch of a step is there."""
        if not self._began:
            self._began = time.perf_counter()

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Note when the last forward pass of a step has ended."""
        self._computed = time.perf_counter()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Add a step to the account, and compare if it is time to."""
        if not phase.is_train:
            self._began = 0.0
            return
        if self._ended:
            self._data.append(self._began - self._ended)
            self._forward.append(self._computed - self._began)
        if run.state.updates % self.every_updates == 0:
            self._compare(run)
        self._began = 0.0
        self._ended = time.perf_counter()

    def _compare(self, run: Run) -> None:
        mine = Pace(median(self._data), median(self._forward)) if self._data else None
        self._data.clear()
        self._forward.clear()
        found = run.world.gather(mine)
        if found is None or self._hosts is None:
            return
        paces = [pace for pace in found if pace is not None]
        if len(paces) < run.world.size:
            return
        seconds = own(paces)
        usual = median(seconds)
        updates = run.state.updates
        for rank, taken in enumerate(seconds):
            slow = taken > self.ratio * usual and taken - usual >= self._seconds
            if slow and updates - self._told.get(rank, -self.repeat_updates) >= self.repeat_updates:
                self._told[rank] = updates
                log.warning(
                    "process %d of %d (%s) holds the others up: it takes %.1f ms for its own part of a step, %.1f "
                    "times the median of all (%.1f ms); of it, %.1f ms until it has its batch",
                    *(
                        rank,
                        run.world.size,
                        self._hosts[rank],
                        1000 * taken,
                        taken / usual if usual else float("inf"),
                    ),
                    *(1000 * usual, 1000 * paces[rank].data),
                )


def own(paces: Sequence[Pace]) -> list[float]:
    """Return the seconds that each process has needed for itself.

    Where buffers or weights go round before a forward pass, processes wait there for the one that
    got its batch last. So much is taken off, down to the shortest forward pass of all: where
    nothing goes round, nobody has waited.
    """
    last = max(pace.data for pace in paces)
    shortest = min(pace.forward for pace in paces)
    return [pace.data + max(shortest, pace.forward - (last - pace.data)) for pace in paces]
