"""Further schedules: exponential and step decay, polynomial, inverse square root, warm-up with a
stable phase, and restarts."""

import math
from bisect import bisect_right
from typing import Literal

from fvcore.common.param_scheduler import (
    ExponentialParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
)

from phasetrain.config.checks import check_at_least, check_positive
from phasetrain.optim.schedules.curves import TOLERANCE
from phasetrain.optim.schedules.durations import RunLength
from phasetrain.optim.schedules.schedules import SCHEDULES


class Steps(ParamScheduler):
    """`factor ** (number of whole widths passed)`; a width is a fraction of the run."""

    def __init__(self, factor: float, width: float) -> None:
        self.factor = factor
        self.width = width

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        passed = math.floor((where + TOLERANCE) / self.width) if self.width else 0
        # A power of the count, not a product over steps: the value does not depend on the path to
        # it.
        return float(self.factor**passed)


class InverseSqrt(ParamScheduler):
    """`(1 + progress / timescale) ** -0.5`; a timescale of 0 means a run without updates."""

    def __init__(self, timescale: float) -> None:
        self.timescale = timescale

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        if self.timescale:
            return float((1 + where / self.timescale) ** -0.5)
        return 1.0


class Cooldown(ParamScheduler):
    """1, and over the last share `length` down to `end`: by a line, half a cosine wave, or 1 -
    sqrt(progress)."""

    def __init__(self, length: float, end: float, shape: str) -> None:
        self.length = length
        self.end = end
        self.shape = shape

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        begin = 1 - self.length
        if where + TOLERANCE < begin or not self.length:
            return 1.0
        share = max(0.0, (where - begin) / self.length)
        left = {
            "linear": 1 - share,
            "cosine": (1 + math.cos(math.pi * share)) / 2,
            "sqrt": 1 - math.sqrt(share),
        }
        return float(self.end + (1 - self.end) * left[self.shape])


class Restarts(ParamScheduler):
    """Half cosine waves from a peak to `end`, one after the other.

    Args:
        period: length of the first one; 0 means a run without updates.
        growth: ratio of successive lengths, at least 1.
        decay: ratio of successive peaks; no peak is below `end`.
        end: multiplier at the end of each.
    """

    def __init__(self, period: float, growth: float, decay: float, end: float) -> None:
        self.period = period
        self.growth = growth
        self.decay = decay
        self.end = end
        self._begins = [0.0]
        # With growth 1 the beginnings are multiples of the period, and there may be very many of
        # them.
        while growth > 1 and period and self._begins[-1] < 1:
            self._begins.append(self._begins[-1] + period * growth ** (len(self._begins) - 1))

    def __call__(self, where: float) -> float:
        """Return the multiplier at `where`."""
        if not self.period:
            return 1.0
        if self.growth > 1:
            number = bisect_right(self._begins, where + TOLERANCE) - 1
            begin = self._begins[number]
            length = self.period * self.growth**number
        else:
            number = math.floor((where + TOLERANCE) / self.period)
            begin = number * self.period
            length = self.period
        # The tolerance above may place `where` a little before or after the wave.
        share = min(1.0, max(0.0, (where - begin) / length))
        peak = max(self.end, self.decay**number)
        return float(self.end + (peak - self.end) * (1 + math.cos(math.pi * share)) / 2)


@SCHEDULES.register("exponential")
def make_exponential(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    end: float,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Exponential decay `end ** progress`, from 1 to `end` (above 0)."""
    check_positive(end=end)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(ExponentialParamScheduler(1.0, end), warmup, warmup_start)


@SCHEDULES.register("step")
def make_step(
    factor: float,
    every: float | str,
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Step decay: multiply by `factor` (above 0) at intervals of the duration `every`."""
    check_positive(factor=factor)
    run = RunLength(updates, updates_per_epoch, batch_size)
    width = run.fraction("every", every)
    if updates and width == 0:
        raise ValueError(f"every = {every!r}: expected a duration above 0")
    return run.warmed(Steps(factor, width), warmup, warmup_start, rescaled=False)


@SCHEDULES.register("polynomial")
def make_polynomial(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    power: float = 1.0,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Polynomial decay `(1 - progress) ** power` from 1 to 0, with a power above 0."""
    check_positive(power=power)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(PolynomialDecayParamScheduler(1.0, power), warmup, warmup_start)


@SCHEDULES.register("inverse_sqrt")
def make_inverse_sqrt(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    timescale: float | str | None = None,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Inverse square root decay `1 / sqrt(1 + t / timescale)`, t being the time since the warm-up
    (Vaswani et al. 2017, arXiv:1706.03762).

    `timescale` is a duration above 0; without one it is the warm-up's, which makes
    `sqrt(warmup / u)` at update u.
    """
    run = RunLength(updates, updates_per_epoch, batch_size)
    scale = run.fraction("timescale", warmup if timescale is None else timescale)
    if updates and scale == 0:
        raise ValueError(
            f"timescale = {timescale!r} and warmup = {warmup!r}: expected one of them above 0, "
            "such as warmup: 1000 updates"
        )
    left = 1 - run.fraction("warmup", warmup)
    return run.warmed(InverseSqrt(scale / left if left > 0 else scale), warmup, warmup_start)


@SCHEDULES.register("wsd")
def make_wsd(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    decay: float | str = 0.1,
    end: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Warm-up, stable, decay: 1 after the warm-up, then a decay to `end` over the final `decay`.

    `decay` is a duration up to the end of the run (Hu et al. 2024, arXiv:2404.06395); `shape: sqrt`
    is `1 - sqrt(progress)` (Haegele et al. 2024, arXiv:2405.18392).
    """
    check_at_least(0, end=end)
    run = RunLength(updates, updates_per_epoch, batch_size)
    run.check_room(warmup=warmup, decay=decay)
    return run.warmed(
        Cooldown(run.fraction("decay", decay), end, shape), warmup, warmup_start, rescaled=False
    )


@SCHEDULES.register("cosine_restarts")
def make_cosine_restarts(
    period: float | str,
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    growth: float = 1.0,
    decay: float = 1.0,
    end: float = 0.0,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Cosine decays to `end` with restarts, the first one after `period` (SGDR,
    arXiv:1608.03983).

    Each wave is `growth` (at least 1) times as long as the one before it, and begins at `decay`
    (above 0, at most 1) times its peak. Waves begin after the warm-up; the last one ends with the
    run, wherever it is then.
    """
    check_at_least(0, end=end)
    check_at_least(1, growth=growth)
    if not 0 < decay <= 1:
        raise ValueError(f"decay = {decay}: expected a factor above 0, at most 1")
    run = RunLength(updates, updates_per_epoch, batch_size)
    run.check_room(warmup=warmup, period=period)
    width = run.fraction("period", period)
    left = 1 - run.fraction("warmup", warmup)
    if updates and width == 0:
        raise ValueError(f"period = {period!r}: expected a duration above 0")
    return run.warmed(
        Restarts(width / left if left > 0 else width, growth, decay, end), warmup, warmup_start
    )
