"""The shapes behind the schedules: pure functions of progress in [0, 1]."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from fvcore.common.param_scheduler import LinearParamScheduler, ParamScheduler

# `where` and durations are quotients that may differ in their last bits (3 / 10 < 3 * 0.1): a
# milestone counts
# as reached this much before it. One update is longer than that in all runs below a thousand
# million updates.
TOLERANCE = 1e-9


class Milestones(ParamScheduler):
    """`factor ** (number of milestones reached)`, places being fractions of the run.

    Fvcore's MultiStepParamScheduler counts a milestone as reached a millionth of the run before it,
    which is many updates of a long run.
    """

    def __init__(self, factor: float, places: Sequence[float]) -> None:
        self.factor = factor
        self.places = list(places)

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        return float(self.factor ** bisect_right(self.places, where + TOLERANCE))


class Warmup(ParamScheduler):
    """A straight line from `start` to the first value of `main`, then `main`.

    Args:
        main: schedule after the warm-up.
        length: length of the warm-up, as a fraction of the run.
        start: first multiplier.
        rescaled: `main` runs from its start to its end over the rest of the run; otherwise it goes
            by the run.
    """

    def __init__(
        self, main: ParamScheduler, length: float, start: float, *, rescaled: bool = True
    ) -> None:
        self.main = main
        self.length = length
        self.rescaled = rescaled
        self.line = LinearParamScheduler(start, main(0.0 if rescaled else length))

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        if where < self.length:
            return float(self.line(where / self.length))
        if self.rescaled:
            where = (where - self.length) / (1 - self.length)
        return float(self.main(where))


class OneCycle(ParamScheduler):
    """From `start` to `peak` over the share `rise`, then to `end`, each along half a cosine wave or
    a line; the share `until` of it."""

    def __init__(
        self,
        rise: float,
        start: float,
        peak: float,
        end: float,
        *,
        cosine: bool,
        until: float = 1.0,
    ) -> None:
        self.until = until
        self.rise = rise
        self.start = start
        self.peak = peak
        self.end = end
        self.cosine = cosine

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        where *= self.until
        if where < self.rise:
            return self._between(self.start, self.peak, where / self.rise)
        return self._between(self.peak, self.end, (where - self.rise) / (1 - self.rise))

    def _between(self, first: float, last: float, share: float) -> float:
        if self.cosine:
            share = (1 - math.cos(math.pi * share)) / 2
        return float(first + (last - first) * share)


@dataclass(frozen=True)
class Part:
    """One of several schedules that follow each other.

    Attributes:
        schedule: its curve.
        begin, end: where it holds, as fractions of the run.
        rescaled: it runs from its start to its end here; otherwise it goes by the run, and is
            joined in its middle.
    """

    schedule: ParamScheduler
    begin: float
    end: float
    rescaled: bool

    def __call__(self, where: float) -> float:
        """Return the multiplier at a place of the run."""
        if not self.rescaled:
            return float(self.schedule(where))
        width = self.end - self.begin
        if not width:
            return float(self.schedule(0.0))
        # The tolerance of the chain may place `where` just outside of the part.
        return float(self.schedule(min(1.0, max(0.0, (where - self.begin) / width))))


class Chain(ParamScheduler):
    """Schedules one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self._begins = [part.begin for part in parts]

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        return self.parts[bisect_right(self._begins, where + TOLERANCE) - 1](where)
