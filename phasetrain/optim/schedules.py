"""Schedules: what an optimizer's option is multiplied by, as a function of the progress of training.

Every schedule is a `ParamScheduler` of fvcore: a pure function of `where`, updates done / updates planned, in
[0, 1). It returns a multiplier of the option's configured value, so `OPTIMIZER.lr` stays the peak of a
learning rate under `cosine`.

**Durations** (`warmup`, `every`, `milestones`) are a fraction of the run (`0.05`) or a text with a unit:
`"5 %"`, `"5 epochs"`, `"500 updates"`, `"10000 samples"`.

**Warm-up**: for its duration the multiplier goes linearly from `warmup_start` to the schedule's first value. The
schedule itself then runs over the rest of the training, from its start to its end. `step` and `multistep` are
the exception: their durations count from the start of training, warm-up included, so that `"30 epochs"` is
epoch 30 of the run with a warm-up as without (as in Goyal et al. 2017, arXiv:1706.02677).

`updates`, `updates_per_epoch` and `batch_size` are facts of the run: the plan gives them, a config need not.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from fvcore.common.param_scheduler import (
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
)

from phasetrain.errors import did_you_mean
from phasetrain.registry import Registry

SCHEDULES: Registry[ParamScheduler] = Registry("schedule", "OPTIMIZER.SCHEDULES")

UNITS = ("epochs", "updates", "samples", "%")
DURATION = re.compile(r"\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>%|[A-Za-z]*)\s*")
# `where` and durations are quotients that may differ in their last bits (3 / 10 < 3 * 0.1): a milestone counts
# as reached this much before it. One update is longer than that in all runs below a thousand million updates.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class RunLength:
    """What durations are measured against.

    Args:
        updates: updates of the run.
        updates_per_epoch: updates in one pass over the training data.
        batch_size: samples per update.
    """

    updates: int
    updates_per_epoch: float
    batch_size: int

    def fraction(self, key: str, duration: float | str) -> float:
        """Return a duration as a fraction of the run, above 1 when it is longer; 0 in a run without updates.

        Args:
            key: the parameter that gave it, for messages.
            duration: a fraction, or a number and a unit: `"5 epochs"`, `"500 updates"`, `"10000 samples"`, `"5 %"`.

        Raises:
            ValueError: no number, an unknown unit, a negative duration, or a fraction above 1.
        """
        number, unit = _parsed(key, duration)
        if not 0 <= number < math.inf:
            raise ValueError(f"{key} = {duration!r}: expected a duration of at least 0")
        if unit == "" and number > 1:
            raise ValueError(
                f"{key} = {duration!r}: a number without a unit is a fraction of the run, in [0, 1]; "
                f"write '{duration} epochs' or '{duration} updates'"
            )
        if self.updates == 0:
            return 0.0
        updates = {
            "": self.updates,
            "%": self.updates / 100,
            "epochs": self.updates_per_epoch,
            "updates": 1,
            "samples": 1 / self.batch_size,
        }
        return number * updates[unit] / self.updates

    def warmed(self, main: ParamScheduler, warmup: float | str, warmup_start: float) -> ParamScheduler:
        """Return `main` with a warm-up in front, see the head of this module.

        Raises:
            ValueError: a warm-up that leaves nothing of the run, or a negative start.
        """
        length = self.fraction("warmup", warmup)
        _check_not_negative(warmup_start=warmup_start)
        if length >= 1:
            raise ValueError(
                f"warmup = {warmup!r} is not shorter than the run, which has {self.updates} updates "
                f"({self.updates / self.updates_per_epoch:.4g} epochs)"
            )
        return _Warmup(main, length, warmup_start) if length else main


@SCHEDULES.register("constant")
def constant(
    updates: int, updates_per_epoch: float, batch_size: int, warmup: float | str = 0.0, warmup_start: float = 0.0
) -> ParamScheduler:
    """Return 1 everywhere (after the warm-up)."""
    run = RunLength(updates, updates_per_epoch, batch_size)
    # Fvcore's ConstantParamScheduler raises at where = 1.
    return run.warmed(LinearParamScheduler(1.0, 1.0), warmup, warmup_start)


@SCHEDULES.register("linear")
def linear(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    end: float = 0.0,
    start: float = 1.0,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Return a straight line from `start` to `end`, both at least 0."""
    _check_not_negative(start=start, end=end)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(LinearParamScheduler(start, end), warmup, warmup_start)


@SCHEDULES.register("cosine")
def cosine(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    end: float = 0.0,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Return half a cosine wave from 1 to `end` (Loshchilov and Hutter 2016, arXiv:1608.03983, without restarts)."""
    _check_not_negative(end=end)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(CosineParamScheduler(1.0, end), warmup, warmup_start)


@SCHEDULES.register("exponential")
def exponential(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    end: float,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Return `end ** progress`: from 1 to `end`, which is above 0, by the same factor in every update."""
    _check_positive(end=end)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(ExponentialParamScheduler(1.0, end), warmup, warmup_start)


@SCHEDULES.register("polynomial")
def polynomial(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    power: float = 1.0,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Return `(1 - progress) ** power`, with a power above 0: from 1 to 0."""
    _check_positive(power=power)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(PolynomialDecayParamScheduler(1.0, power), warmup, warmup_start)


@SCHEDULES.register("step")
def step(
    factor: float,
    every: float | str,
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Return 1, multiplied by `factor` (above 0) after each `every`, a duration above 0 from the start of training."""
    _check_positive(factor=factor)
    run = RunLength(updates, updates_per_epoch, batch_size)
    width = run.fraction("every", every)
    if updates and width == 0:
        raise ValueError(f"every = {every!r}: expected a duration above 0")
    return run.warmed(_Steps(factor, width), warmup, warmup_start)


@SCHEDULES.register("multistep")
def multistep(
    milestones: Sequence[float | str],
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    factor: float = 0.1,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Return 1, multiplied by `factor` (above 0) at each of `milestones`, ascending durations from the start.

    A milestone after the end of the run is never reached, so a recipe can be tried out on a shorter run.
    """
    _check_positive(factor=factor)
    run = RunLength(updates, updates_per_epoch, batch_size)
    places = [run.fraction("milestones", milestone) for milestone in milestones]
    if places != sorted(places):
        raise ValueError(f"milestones = {list(milestones)}: expected ascending order")
    return run.warmed(_Milestones(factor, places), warmup, warmup_start)


class _Steps(ParamScheduler):
    """`factor ** (number of whole widths passed)`; a width is a fraction of the run."""

    def __init__(self, factor: float, width: float) -> None:
        self.factor = factor
        self.width = width

    def __call__(self, where: float) -> float:
        passed = math.floor((where + TOLERANCE) / self.width) if self.width else 0
        return float(self.factor**passed)


class _Milestones(ParamScheduler):
    """`factor ** (number of milestones reached)`, places being fractions of the run.

    Fvcore's MultiStepParamScheduler counts a milestone as reached a millionth of the run before it, which is many
    updates of a long run.
    """

    def __init__(self, factor: float, places: Sequence[float]) -> None:
        self.factor = factor
        self.places = list(places)

    def __call__(self, where: float) -> float:
        return float(self.factor ** bisect_right(self.places, where + TOLERANCE))


class _Warmup(ParamScheduler):
    """A straight line from `start` to the first value of `main`, then `main` over the rest of the run."""

    def __init__(self, main: ParamScheduler, length: float, start: float) -> None:
        self.main = main
        self.length = length
        self.rescaled = not isinstance(main, _Steps | _Milestones)
        self.line = LinearParamScheduler(start, main(0.0 if self.rescaled else length))

    def __call__(self, where: float) -> float:
        if where < self.length:
            return float(self.line(where / self.length))
        return float(self.main((where - self.length) / (1 - self.length) if self.rescaled else where))


def _parsed(key: str, duration: float | str) -> tuple[float, str]:
    if not isinstance(duration, str):
        return float(duration), ""
    found = DURATION.fullmatch(duration)
    unit = found["unit"].lower() if found else ""
    if unit.isalpha():
        unit = unit.removesuffix("s") + "s"  # `1 epoch` is understood
    if not found or (unit and unit not in UNITS):
        raise ValueError(
            f"{key} = {duration!r}: expected a fraction of the run such as 0.05, or a number with one of the units "
            f"{', '.join(UNITS)}, such as '5 epochs'{did_you_mean(unit, UNITS)}"
        )
    return float(found["number"]), unit


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} = {value}: expected a multiplier of at least 0")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} = {value}: expected a number above 0")
