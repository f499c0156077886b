"""How options of an optimizer, such as the learning rate, go through a run and its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fvcore.common.param_scheduler import LinearParamScheduler, ParamScheduler
from torch import Tensor

from phasetrain.errors import ConfigError

Groups = Sequence[dict[str, Any]]
"""Groups of parameters, as `Optimizer.param_groups`."""

FLAT = LinearParamScheduler(1.0, 1.0)

OwnSchedules = Mapping[int, Mapping[str, ParamScheduler]]
"""Number of a group -> option -> factor as a function of `where`."""

NO_SCHEDULES: OwnSchedules = MappingProxyType({})


@dataclass(frozen=True)
class StageOptions:
    """What a stage does with options of the optimizer.

    Attributes:
        schedules: option -> factor as a function of the progress in the stage, for those that the
            stage gives itself.
        values: option -> its value in the whole run, and in the stage.
    """

    schedules: Mapping[str, ParamScheduler] = field(default_factory=dict)
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Line:
    """One option of one group in one stage: `base * schedule(progress)`."""

    group: int
    option: str
    base: float
    schedule: ParamScheduler
    within: bool


class Course:
    """Sets every scheduled option of the groups to its value, a function of the position alone.

    Args:
        groups: of the optimizer, with the values that schedules multiply.
        schedules: option -> factor as a function of `where`; options without one stay constant.
        stages: what each stage changes; empty where there are none.
        own: number of a group of another optimizer than the main one -> schedules of its own; of
            all others it follows those whose option it has.

    Attributes:
        options: (number of the group, option) of all that is set.

    Raises:
        ConfigError: a schedule for an option that the optimizer does not have, or a stage that
            scales a learning rate of zero.
    """

    def __init__(
        self,
        groups: Groups,
        schedules: Mapping[str, ParamScheduler],
        stages: Sequence[StageOptions] = (),
        own: OwnSchedules = NO_SCHEDULES,
    ) -> None:
        every = stages or (StageOptions(),)
        names = list(
            dict.fromkeys(
                [*schedules, *(name for one in every for name in (*one.schedules, *one.values))]
            )
        )
        self._stages = [
            [
                _Line(
                    number,
                    option,
                    _base(group, option, stage.values.get(option) if number not in own else None),
                    stage.schedules.get(option, schedules.get(option, FLAT)),
                    option in stage.schedules,
                )
                for option in names
                for number, group in enumerate(groups)
                if number not in own or (option in group and option not in own[number])
            ]
            + [
                _Line(number, option, _base(groups[number], option, None), schedule, within=False)
                for number, mine in own.items()
                for option, schedule in mine.items()
            ]
            for stage in every
        ]
        self.options = {(line.group, line.option) for line in self._stages[0]}
        self._factor = 1.0
        self._lr = [group.get("lr") for group in groups]

    @property
    def factor(self) -> float:
        """What all learning rates are multiplied by, beside their schedules; 1 unless something has
        set it."""
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        """Multiply all learning rates by `value` from the next update on."""
        self._factor = value
        alone = [number for number in range(len(self._lr)) if (number, "lr") not in self.options]
        if alone:  # what no schedule sets anew has to be, before it is multiplied
            bases = {number: _base({"lr": self._lr[number]}, "lr", None) for number in alone}
            lines = [
                _Line(number, "lr", base, FLAT, within=False) for number, base in bases.items()
            ]
            self._stages = [[*stage, *lines] for stage in self._stages]
            self.options |= {(line.group, "lr") for line in lines}

    def follow(self, groups: Groups, where: float, stage: int = 0, within: float = 0.0) -> None:
        """Set the options of groups.

        Args:
            groups: of the optimizer as they are now: torch replaces them when it loads a state.
            where: progress of the training in [0, 1).
            stage: number of the stage.
            within: progress in the stage in [0, 1).
        """
        for line in self._stages[stage]:
            groups[line.group][line.option] = line.base * line.schedule(
                within if line.within else where
            )
        if self._factor != 1.0:
            for group in groups:
                group["lr"] *= self._factor


def _base(group: Mapping[str, Any], option: str, change: tuple[float, float] | None) -> float:
    value = group.get(option)
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        options = ", ".join(name for name in group if name != "params")
        raise ConfigError(
            f"OPTIMIZER.SCHEDULES.{option}: the optimizer has no number of that name to schedule; it has {options}"
        )
    if change is None:
        return float(value)
    before, now = change
    if option != "lr":  # a rule for this group alone stands above what is said of all
        if float(value) == before:
            return float(now)
        return float(value)
    if before == 0:
        raise ConfigError(
            f"OPTIMIZER.lr = 0 and a stage with {now}: learning rates of groups are factors of it"
        )
    return float(value) * (now / before)
