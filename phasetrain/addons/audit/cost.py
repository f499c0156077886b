"""The cost of a kill: the updates after the last checkpoint, and the time that they took."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from phasetrain.addons.audit.trace import Ranks, Update

MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Cost:
    """Loss by one kill; times are taken from the run that was not killed.

    Attributes:
        kill_at: updates that were made before the kill.
        resumed_after: update after which the next process continued; 0 if it began again.
        updates: number of updates that were lost.
        samples: number of samples that they had trained, of all ranks.
        seconds: time that these updates took, including tests and saves between them.
        restart: time from the beginning of the next process to its first update; None if it made
            none.
    """

    kill_at: int
    resumed_after: int
    updates: int
    samples: int
    seconds: float
    restart: float | None


def measure_cost(unbroken: Ranks, killed: Ranks, resumed: Ranks, start: int) -> Cost:
    """Return the cost of a kill.

    Args:
        unbroken: records of the run that was not killed.
        killed: records of the processes that were killed.
        resumed: records of the processes after them.
        start: number of updates of `killed` that count.
    """
    made = len(next(iter(killed.values())).updates)
    lost = [update for trace in killed.values() for update in trace.updates[start:]]
    times = next(iter(unbroken.values())).updates[start:made]
    begun = [trace.updates[0].seconds for trace in resumed.values() if trace.updates]
    return Cost(
        kill_at=made,
        resumed_after=start,
        # Weights that do not change for a while, such as frozen ones, look like later ones.
        updates=max(0, made - start),
        samples=sum(len(update.flat_samples) for update in lost),
        seconds=round(_add_times(times), 6),
        restart=max(begun) if begun else None,
    )


def describe_cost(cost: Cost) -> str:
    """Return the cost of a kill as a sentence."""
    lost = "lost no update"
    if cost.updates:
        samples = f" with {cost.samples} samples" if cost.samples else ""
        updates = "1 update" if cost.updates == 1 else f"{cost.updates} updates"
        resumed = f"the run was resumed after update {cost.resumed_after}"
        if not cost.resumed_after:
            resumed = "no checkpoint was used"
        lost = f"lost {updates}{samples}, which took {format_time(cost.seconds)}: {resumed}"
    restart = ""
    if cost.restart is not None:
        restart = f" The next process made its first update after {format_time(cost.restart)}."
    return f"The kill after update {cost.kill_at} {lost}.{restart}"


def describe_worst_kill(unbroken: Ranks, points: Sequence[int]) -> str:
    """Return a sentence about the loss by the worst kill of the unbroken run.

    Args:
        unbroken: records of the run that was not killed.
        points: updates after which a checkpoint was written.
    """
    updates = next(iter(unbroken.values())).updates
    ends = sorted({0, *points, len(updates)})
    longest = max((updates[first:last] for first, last in pairwise(ends)), key=_add_times)
    return (
        f"The longest time without a checkpoint was {format_time(_add_times(longest))}, with "
        f"{len(longest)} updates: a kill at its end loses all of it."
    )


def _add_times(updates: Sequence[Update]) -> float:
    # That of the first update has the start of the process, and no checkpoint would keep it.
    return sum(update.seconds for update in updates if update.number > 1)


def format_time(seconds: float) -> str:
    """Return a time in milliseconds, seconds, minutes or hours."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    if seconds < HOUR:
        return f"{seconds / MINUTE:.1f} minutes"
    return f"{seconds / HOUR:.1f} hours"
