"""Scheduled options of an optimizer, such as the learning rate, over a run and its stages."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fvcore.common.param_scheduler import LinearParamScheduler, ParamScheduler
from torch import Tensor

from phasetrain.errors import ConfigError

log = logging.getLogger(__name__)

ParamGroups = Sequence[dict[str, Any]]
"""Parameter groups, as `Optimizer.param_groups`."""

CONSTANT = LinearParamScheduler(1.0, 1.0)


class HeldSchedule(ParamScheduler):
    """A schedule that is asked for its value at the start of each epoch only (`every: epoch`).

    Args:
        schedule: factor as a function of `where`.
    """

    def __init__(self, schedule: Callable[[float], float]) -> None:
        self.schedule = schedule

    def __call__(self, where: float) -> float:
        """Return the factor at the start of an epoch."""
        return self.schedule(where)


PROBES = 100
"""Number of points at which a schedule is looked at."""

GroupSchedules = Mapping[int, Mapping[str, ParamScheduler]]
"""Number of a group -> option -> factor as a function of `where`."""


@dataclass(frozen=True)
class StageOptions:
    """Changes that a stage makes to options of the optimizer.

    Attributes:
        schedules: option -> factor as a function of the progress in the stage, for schedules that
            the stage sets itself.
        values: option -> its value in the whole run, and in the stage.
    """

    schedules: Mapping[str, ParamScheduler] = field(default_factory=dict)
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedules:
    """Changes of an optimizer's options over a run.

    Attributes:
        options: option -> factor as a function of `where`; options without one stay constant.
        stages: changes that each stage makes; empty if there are no stages.
        groups: schedules of groups with their own. Such a group follows `options` only for options
            without a schedule here.
        main: number of groups, from the first, of the optimizer whose values a stage changes; all
            others are of OPTIMIZER.others.
    """

    options: Mapping[str, ParamScheduler] = field(default_factory=dict)
    stages: Sequence[StageOptions] = ()
    groups: GroupSchedules = field(default_factory=dict)
    main: int = 0


@dataclass(frozen=True)
class _ScheduledOption:
    """One option of one group in one stage: `base * schedule(progress)`."""

    group: int
    option: str
    base: float
    schedule: ParamScheduler
    within_stage: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it only changes at the start of an epoch."""
        return isinstance(self.schedule, HeldSchedule)

    def peak(self, begin: float) -> float:
        """Return the highest value at `PROBES` points of progress in [begin, 1)."""
        points = (begin + (1 - begin) * step / PROBES for step in range(PROBES))
        return max(abs(self.base * self.schedule(point)) for point in points)


class ParamSchedules:
    """Sets every scheduled option to its value, a function of the position alone.

    Args:
        groups: groups of the optimizer, with the values that schedules multiply.
        schedules: schedules of the run.

    Attributes:
        options: (number of the group, option) of every option that is set.

    Raises:
        ConfigError: a schedule for an option that the optimizer does not have, or a stage that
            scales a learning rate of zero.
    """

    def __init__(self, groups: ParamGroups, schedules: Schedules) -> None:
        stages = schedules.stages or (StageOptions(),)
        # A dict keeps the order and drops repetitions.
        names = dict.fromkeys(schedules.options)
        for stage in stages:
            names |= dict.fromkeys([*stage.schedules, *stage.values])
        self._stages = [list(_list_options(groups, schedules, stage, names)) for stage in stages]
        self.options = {(entry.group, entry.option) for entry in self._stages[0]}
        self._factor = 1.0
        # What the last `apply` has set. A loaded state replaces the groups, and these stay.
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._warns = True
        # Noted before the first `apply` writes scheduled values into the groups.
        self._base_lrs = [group.get("lr") for group in groups]

    @property
    def factor(self) -> float:
        """Factor of all learning rates, on top of their schedules."""
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        """Multiply all learning rates by `value` from the next update on."""
        self._factor = value
        # A learning rate without a schedule has to be reset before it is multiplied again.
        constant = [
            _ScheduledOption(number, "lr", _base_value({"lr": lr}, "lr", None), CONSTANT)
            for number, lr in enumerate(self._base_lrs)
            if (number, "lr") not in self.options
        ]
        self._stages = [[*stage, *constant] for stage in self._stages]
        self.options |= {(entry.group, "lr") for entry in constant}

    def remaining_lr(self, where: float) -> float:
        """Return the highest learning rate from `where` on, as a fraction of the highest one of the
        whole schedule; 1.0 for constant learning rates and for stages with their own schedules."""
        rates = [entry for entry in self._stages[0] if entry.option == "lr"]
        if len(self._stages) > 1 or not rates:
            return 1.0
        peak = max(rate.peak(0.0) for rate in rates)
        if peak == 0:
            return 1.0
        return max(rate.peak(where) for rate in rates) / peak

    def _warn_of_overwritten(self, option: str, value: Any) -> None:
        """Warn once that other code has set an option since the last `apply`."""
        if self._warns:
            log.warning(
                "OPTIMIZER.SCHEDULES.%s: a hook or other code has set %s = %s; the schedule sets "
                "it again before each update, so this has no effect. Leave the schedule out, or "
                "set `updater.factor`, which multiplies all learning rates",
                option,
                option,
                value,
            )
        self._warns = False

    def apply(
        self,
        groups: ParamGroups,
        where: float,
        stage: int = 0,
        within: float = 0.0,
        epoch_start: tuple[float, float] | None = None,
    ) -> None:
        """Set the scheduled options of the groups.

        Args:
            groups: current groups of the optimizer; torch replaces them when it loads a state.
            where: progress of the training in [0, 1).
            stage: number of the stage.
            within: progress in the stage in [0, 1).
            epoch_start: both at the start of the epoch, for schedules with `every: epoch`; None:
                the epoch starts here.
        """
        for group, option, value in self._values:
            if group[option] != value:
                self._warn_of_overwritten(option, group[option])
        now = (where, within)
        for entry in self._stages[stage]:
            at = now
            if epoch_start is not None and entry.is_held:
                at = epoch_start
            progress = at[1] if entry.within_stage else at[0]
            groups[entry.group][entry.option] = entry.base * entry.schedule(progress)
        if self._factor != 1.0:
            for group in groups:
                group["lr"] *= self._factor
        if self.options:
            self._values = [(groups[n], option, groups[n][option]) for n, option in self.options]


def _list_options(
    groups: ParamGroups, schedules: Schedules, stage: StageOptions, names: Iterable[str]
) -> Iterator[_ScheduledOption]:
    """Yield the options of all groups that follow schedules of the run, of a stage or of the
    group."""
    for number, group in enumerate(groups):
        own = schedules.groups.get(number, {})
        is_other = number in schedules.groups and number >= schedules.main
        for option in dict.fromkeys((*names, *own)):
            # A group of another optimizer may lack the option (betas, momentum); this is not an
            # error there.
            if is_other and option not in own and option not in group:
                continue
            change = None if is_other else stage.values.get(option)
            schedule = stage.schedules.get(option, schedules.options.get(option, CONSTANT))
            yield _ScheduledOption(
                number,
                option,
                _base_value(group, option, change),
                own.get(option, schedule),
                option in stage.schedules.keys() - own.keys(),
            )


def _base_value(group: Mapping[str, Any], option: str, change: tuple[float, float] | None) -> float:
    """Return the value that a schedule multiplies, after the change that a stage makes."""
    value = group.get(option)
    # A bool is an int in Python, and multiplying `nesterov` would go unnoticed.
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        options = ", ".join(name for name in group if name != "params")
        raise ConfigError(
            f"OPTIMIZER.SCHEDULES.{option}: the optimizer has no numeric option of this name; it "
            f"has {options}"
        )
    if change is None:
        return float(value)
    before, now = change
    if option != "lr":
        # A value that a rule of OPTIMIZER.groups has set for this group takes precedence.
        return float(now) if float(value) == before else float(value)
    if before == 0:
        raise ConfigError(
            f"OPTIMIZER.lr = 0, and a stage sets {now}: the learning rates of groups are factors "
            "of OPTIMIZER.lr; set it above 0"
        )
    # A ratio, so that `lr_scale` and `layer_decay` of a group hold in every stage.
    return float(value) * (now / before)
