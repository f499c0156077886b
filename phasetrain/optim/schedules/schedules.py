"""Schedules: factors of an optimizer's option as a function of the progress of training.

Every schedule is a `ParamScheduler` of fvcore: a pure function of `where`, updates done / updates
planned, in [0, 1). It returns a multiplier of the option's configured value, so `OPTIMIZER.lr`
stays the peak of a learning rate under `cosine`. Updates done are those attempted: one that was
skipped because it was not finite counts, so a schedule never depends on a gradient
scaler.

**Durations** (`warmup`, `every`, `milestones`, ...) are a fraction of the run (`0.05`) or a text
with a unit: `"5 %"`, `"5 epochs"`, `"500 updates"`, `"10000 samples"`.

**Warm-up**: for its duration the multiplier goes linearly from `warmup_start` to the schedule's
first value. The schedule itself then runs over the rest of the training, from its start to its end.
`step` and `multistep` are the exception: their durations count from the start of training, warm-up
included, so that `"30 epochs"` is epoch 30 of the run with a warm-up as without (as in Goyal et al.
2017, arXiv:1706.02677).

`updates`, `updates_per_epoch` and `batch_size` are facts of the run: the plan gives them, a config
need not. A stage of a run gives its own, and its schedule gets the progress within the stage.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fvcore.common.param_scheduler import (
    CosineParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
)

from phasetrain.config.checks import check_at_least, check_fraction, check_positive
from phasetrain.config.registry import Registry
from phasetrain.errors import ConfigError
from phasetrain.optim.schedules.curves import (
    TOLERANCE,
    Chain,
    Milestones,
    OneCycle,
    Part,
)
from phasetrain.optim.schedules.durations import RunLength

SCHEDULES: Registry[ParamScheduler] = Registry("schedule", "OPTIMIZER.SCHEDULES")

MOST_CHECKED = 1000
"""Maximum number of updates for which a schedule is checked before the run."""

OWN = frozenset({"name", "length", "scaling"})
"""Keys of a part of `composite`; all others are parameters of its schedule."""


@SCHEDULES.register("constant")
def make_constant(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Constant factor 1 after the warm-up."""
    run = RunLength(updates, updates_per_epoch, batch_size)
    # Fvcore's ConstantParamScheduler raises at where = 1.
    return run.warmed(LinearParamScheduler(1.0, 1.0), warmup, warmup_start)


@SCHEDULES.register("linear")
def make_linear(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    end: float = 0.0,
    start: float = 1.0,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Linear from `start` to `end`, both at least 0."""
    check_at_least(0, start=start, end=end)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(LinearParamScheduler(start, end), warmup, warmup_start)


@SCHEDULES.register("cosine")
def make_cosine(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    end: float = 0.0,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Cosine decay from 1 to `end` (Loshchilov and Hutter 2016, arXiv:1608.03983,
    without restarts)."""
    check_at_least(0, end=end)
    run = RunLength(updates, updates_per_epoch, batch_size)
    return run.warmed(CosineParamScheduler(1.0, end), warmup, warmup_start)


@SCHEDULES.register("multistep")
def make_multistep(
    milestones: Sequence[float | str],
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    factor: float = 0.1,
    warmup: float | str = 0.0,
    warmup_start: float = 0.0,
) -> ParamScheduler:
    """Step decay: multiply by `factor` (above 0) at each of `milestones`, ascending durations from
    the start.

    A milestone after the end of the run is never reached, so a recipe can be tried out on a shorter
    run.
    """
    check_positive(factor=factor)
    run = RunLength(updates, updates_per_epoch, batch_size)
    places = [run.fraction("milestones", milestone) for milestone in milestones]
    # `bisect` in `Milestones` needs ascending places and would give wrong values silently.
    if places != sorted(places):
        raise ValueError(f"milestones = {list(milestones)}: expected ascending order")
    return run.warmed(Milestones(factor, places), warmup, warmup_start, rescaled=False)


@SCHEDULES.register("one_cycle")
def make_one_cycle(
    updates: int,
    updates_per_epoch: float,
    batch_size: int,
    rise: float | str = 0.3,
    start: float = 0.04,
    peak: float = 1.0,
    end: float = 4e-6,
    shape: Literal["cosine", "linear"] = "cosine",
    until: float = 1.0,
) -> ParamScheduler:
    """One cycle: rise from `start` to `peak` within the duration `rise`, then fall to `end` (Smith
    and Topin, arXiv:1708.07120).

    For a momentum that goes the other way: `start: 1, peak: 0.9, end: 1`. The defaults come from
    torch.optim.lr_scheduler.OneCycleLR. All three multipliers are at least 0. With `until` below 1,
    the cycle is cut off after this share of it.
    """
    check_at_least(0, start=start, peak=peak, end=end)
    check_fraction(until=until)
    run = RunLength(updates, updates_per_epoch, batch_size)
    length = run.fraction("rise", rise)
    if length >= 1:
        raise ValueError(
            f"rise = {rise!r} is not shorter than {run}, so nothing is left for the descent"
        )
    return OneCycle(length, start, peak, end, cosine=shape == "cosine", until=until)


@SCHEDULES.register("composite")
def make_composite(
    parts: Sequence[Mapping[str, Any]], updates: int, updates_per_epoch: float, batch_size: int
) -> ParamScheduler:
    """Several schedules, one after the other.

    Each of `parts` has the `name` of a schedule, its `length` (a duration; the last part may omit
    it and takes the rest), its parameters, and `scaling`: `rescaled` (the default; it runs
    from its start to its end within its part, and durations below it are measured against the part)
    or `fixed` (it goes by the whole run, so it is joined in its middle).
    """
    run = RunLength(updates, updates_per_epoch, batch_size)
    if not parts:
        raise ValueError("parts = []: expected at least one schedule")
    ends = _find_ends(parts, run)
    begins = [0.0, *ends[:-1]]
    return Chain(
        [
            _make_part(number, *span, run)
            for number, span in enumerate(zip(parts, begins, ends, strict=True))
        ]
    )


def check_schedule(where: str, schedule: object, updates: int) -> None:
    """Reject a schedule that is not a function of the progress with a finite number as its value.

    It is called for up to `MOST_CHECKED` updates spread over the run.

    Args:
        where: config path of the schedule.
        schedule: result of the factory.
        updates: number of updates of the run.

    Raises:
        ConfigError: it cannot be called, or a value is not a finite number.
    """
    expected = "expected a function of the progress in [0, 1) that returns a finite number"
    if not callable(schedule):
        type_name = type(schedule).__name__
        raise ConfigError(f"{where}: it is {type_name}, {expected}", code="schedule.invalid")
    count = max(1, min(updates, MOST_CHECKED))
    for number in range(count):
        update = number * max(updates, 1) // count
        progress = update / max(updates, 1)
        at = f"{where}: at update {update} of {updates} (where = {progress:.4g})"
        try:
            value = schedule(progress)
        except Exception as error:
            raise ConfigError(
                f"{at} it fails with {type(error).__name__}: {error}; {expected}",
                code="schedule.invalid",
            ) from error
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"{at} it returns {value!r}; {expected}", code="schedule.invalid")


def _find_ends(parts: Sequence[Mapping[str, Any]], run: RunLength) -> list[float]:
    """Return where each of the parts ends, as a fraction of the run."""
    ends = [0.0]
    for number, part in enumerate(parts):
        if part.get("length") is not None:
            ends.append(ends[-1] + run.fraction(f"parts[{number}].length", part["length"]))
        elif number == len(parts) - 1:
            ends.append(max(1.0, ends[-1]))
        else:
            raise ValueError(
                f"parts[{number}].length: expected a duration; only the last part may leave it out"
            )
    listed = " + ".join(str(part.get("length", "the rest")) for part in parts)
    if ends[-1] > 1 + TOLERANCE:
        raise ValueError(
            f"parts: {listed} take {ends[-1] * run.updates:.6g} updates, more than {run}"
        )
    if run.updates and ends[-1] < 1 - TOLERANCE:
        raise ValueError(
            f"parts: {listed} take {ends[-1] * run.updates:.6g} updates, less than {run}; leave "
            "out the length of the last part"
        )
    if run.updates and ends[-2] > 1 - TOLERANCE:
        raise ValueError(f"parts: {listed} leave nothing for the last part of {run}")
    return ends[1:]


def _make_part(
    number: int, part: Mapping[str, Any], begin: float, end: float, run: RunLength
) -> Part:
    where = f"parts[{number}]"
    scaling = part.get("scaling", "rescaled")
    if scaling not in ("rescaled", "fixed"):
        raise ValueError(f"{where}.scaling = {scaling!r}: expected rescaled or fixed")
    if "name" not in part:
        raise ValueError(f"{where}: expected the name of a schedule. Known: {', '.join(SCHEDULES)}")
    updates = run.updates * (end - begin) if scaling == "rescaled" else run.updates
    if math.isclose(updates, round(updates), rel_tol=0, abs_tol=1e-6):
        updates = round(updates)  # facts of a schedule are whole numbers wherever they can be
    facts = {
        "updates": updates,
        "updates_per_epoch": run.updates_per_epoch,
        "batch_size": run.batch_size,
    }
    params = {key: value for key, value in part.items() if key not in OWN}
    try:
        schedule = SCHEDULES.build(part["name"], params, where=where, facts=facts)
    except ConfigError as error:  # the place of the whole schedule comes in front
        raise ValueError(str(error)) from error
    return Part(schedule, begin, end, rescaled=scaling == "rescaled")
