"""Warns of a slow rank that all others wait for (hook `stragglers`)."""

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSeconds:
    """Time that a rank needs for a step, without the time it waits for other ranks.

    Attributes:
        data: median seconds from the end of a step to the next batch.
        forward: median seconds from there to the end of the last forward pass.
    """

    data: float
    forward: float


@HOOKS.register("stragglers")
class Stragglers(Hook):
    """Compares the step times of the ranks, and logs a warning about slow ones.

    Ranks wait for each other in the backward pass and in the update. The time from the end of a
    step to the end of the last forward pass of the next step is a rank's own. It takes three
    readings of the clock per step, and one gather of two numbers per comparison.

    Args:
        every_updates: updates between two comparisons.
        ratio: a rank is slow if it takes this many times the median of all ranks,
        milliseconds: and this many milliseconds more than the median.
        repeat_updates: updates before the same rank can be reported again.
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
        check_at_least(1, every_updates=every_updates, repeat_updates=repeat_updates)
        check_at_least(0, milliseconds=milliseconds)
        if ratio <= 1:
            raise ValueError(f"ratio = {ratio}: expected more than 1")
        self.every_updates = every_updates
        self.ratio = ratio
        self.repeat_updates = repeat_updates
        self._seconds = milliseconds / 1000
        self._hosts: list[str] | None = None
        self._reported: dict[int, int] = {}  # rank -> update of the last warning
        self._data: list[float] = []
        self._forward: list[float] = []
        # Readings of the clock; 0.0 stands for none.
        self._ended = 0.0
        self._began = 0.0
        self._computed = 0.0

    def on_start(self, run: Run) -> None:
        """Collect the host names."""
        self._hosts = run.world.gather(socket.gethostname())

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Forget the last step: the time between phases is not part of a step."""
        self._ended = 0.0

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Read the clock when the first micro-batch of a step has arrived."""
        if not self._began:
            self._began = time.perf_counter()

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Read the clock; the value after the last forward pass of a step is used."""
        self._computed = time.perf_counter()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Add the times of a step, and compare the ranks if it is due."""
        if not phase.is_train:
            self._began = 0.0
            return
        if self._ended:
            self._data.append(self._began - self._ended)
            self._forward.append(self._computed - self._began)
        if run.state.updates % self.every_updates == 0:
            self._compare_ranks(run)
        self._began = 0.0
        # After the comparison, whose gather waits for the other ranks.
        self._ended = time.perf_counter()

    def _compare_ranks(self, run: Run) -> None:
        mine = StepSeconds(median(self._data), median(self._forward)) if self._data else None
        self._data.clear()
        self._forward.clear()
        gathered = run.world.gather(mine)
        if gathered is None or self._hosts is None:
            return
        by_rank = [seconds for seconds in gathered if seconds is not None]
        # A rank without a timed step would shift the median.
        if len(by_rank) < run.world.size:
            return
        seconds = own_seconds(by_rank)
        usual = median(seconds)
        updates = run.state.updates
        for rank, taken in enumerate(seconds):
            is_slow = taken > self.ratio * usual and taken - usual >= self._seconds
            last_report = self._reported.get(rank, -self.repeat_updates)
            if is_slow and updates - last_report >= self.repeat_updates:
                self._reported[rank] = updates
                log.warning(
                    "rank %d of world size %d (%s) slows down all others: its step takes %.1f ms, "
                    "%.1f times the median of all ranks (%.1f ms), with %.1f ms of data loading",
                    rank,
                    run.world.size,
                    self._hosts[rank],
                    1000 * taken,
                    taken / usual if usual else float("inf"),
                    1000 * usual,
                    1000 * by_rank[rank].data,
                )


def own_seconds(by_rank: Sequence[StepSeconds]) -> list[float]:
    """Return the seconds that each rank needs for a step without waiting for others.

    If a strategy broadcasts buffers or gathers weights before a forward pass, all ranks wait there
    for the one that got its batch last. This wait is subtracted, but no forward pass becomes
    shorter than the shortest one: without such a collective nobody has waited.
    """
    last = max(seconds.data for seconds in by_rank)
    shortest = min(seconds.forward for seconds in by_rank)
    return [
        seconds.data + max(shortest, seconds.forward - (last - seconds.data)) for seconds in by_rank
    ]
