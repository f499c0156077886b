"""The segments of a run between kept checkpoints, and a random choice of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from phasetrain.addons.experiments.verify.evidence import count_updates
from phasetrain.checkpoint.commit import Saved


@dataclass(frozen=True)
class Segment:
    """Updates from one kept checkpoint to the next.

    Attributes:
        first, last: its first and its last update.
        begin: the checkpoint before the first update; None for the start of the run.
        ends: the checkpoints after the last update; empty at the end of a run that was killed.
        obstacle: why it cannot be trained again; empty if it can.
    """

    first: int
    last: int
    begin: Saved | None
    ends: tuple[Saved, ...]
    obstacle: str = ""

    @property
    def updates(self) -> int:
        """Number of updates."""
        return self.last - self.first + 1

    def list_updates(self) -> range:
        """Return its updates."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True)
class Choice:
    """The segments to train again.

    Attributes:
        chosen: in the order of their updates; some may have an obstacle.
        candidates: all segments that can be trained again.
        too_long: candidates that are longer than the share that was asked for.
    """

    chosen: tuple[Segment, ...]
    candidates: tuple[Segment, ...]
    too_long: tuple[Segment, ...] = ()


def list_segments(
    saved: Sequence[Saved], last: int, changes: Sequence[tuple[int, str]] = ()
) -> list[Segment]:
    """Return the segments of a run in the order of their updates.

    Args:
        saved: intact checkpoints, oldest first.
        last: the last update of the run.
        changes: number of updates after which config, data, code or machine changed, and a sentence
            about it.
    """
    by_update = {
        updates: tuple(group)
        for updates, group in groupby(sorted(saved, key=count_updates), count_updates)
    }
    places = sorted({0, last, *by_update})
    segments = []
    for before, after in pairwise(places):
        # Of several at one place the last: the one from which a resume would have continued.
        begin = next(reversed(by_update.get(before, ())), None)
        obstacle = next((text for at, text in changes if before <= at < after), "")
        ends = by_update.get(after, ())
        segments.append(Segment(before + 1, after, begin, ends, obstacle))
    return segments


def choose_segments(
    segments: Sequence[Segment], fraction: float, count: int | None, seed: int
) -> Choice:
    """Choose segments at random.

    Args:
        segments: all segments of a run.
        fraction: share of the updates of the run, above 0 and up to 1. Segments are taken in random
            order as long as they fit. If none of them can be trained again, one of the shortest
            that can be is taken as well.
        count: number of segments instead of a share.
        seed: of the choice.
    """
    # Segments with an obstacle as well: it is a claim of the run, and a forger could hide behind it
    # if they were never asked for.
    shuffled = random.Random(seed).sample(segments, len(segments))
    candidates = [segment for segment in shuffled if not segment.obstacle]
    too_long: tuple[Segment, ...] = ()
    if count is not None:
        chosen = shuffled[:count]
    else:
        total = sum(segment.updates for segment in segments)
        # A run of 999 updates with a checkpoint every 50 has segments that are a bit more than 5 %.
        budget = fraction * total + 1
        too_long = _sort([segment for segment in candidates if segment.updates > budget])
        chosen = []
        for segment in shuffled:
            if segment.updates <= budget:
                chosen.append(segment)
                budget -= segment.updates
    # A short run has few checkpoints; to train nothing again would verify nothing.
    if candidates and all(segment.obstacle for segment in chosen):
        chosen.append(min(candidates, key=lambda segment: segment.updates))
    return Choice(_sort(chosen), _sort(candidates), too_long)


def _sort(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda segment: segment.first))
