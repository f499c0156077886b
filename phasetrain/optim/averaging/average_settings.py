"""What averages of the weights a run asks for, as MODEL.ema and MODEL.swa describe them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.optim.schedules.durations import DURATION


@dataclass(frozen=True)
class EMASettings:
    """A running mean in which each update counts less than the one after it (Polyak and Juditsky
    1992).

    Attributes:
        decay: what the mean keeps of itself each time, in [0, 1).
        warmup: keep less at first: min(decay, (1 + t) / (10 + t)) after t times.
        every: updates from one time to the next.
        test: test it beside the trained weights.
    """

    decay: float = 0.999
    warmup: bool = True
    every: int = 1
    test: bool = True

    def share(self, lengths: Mapping[str, int]) -> float:
        """Return the share of the training after which it is tested."""
        return 0.0


@dataclass(frozen=True)
class SWASettings:
    """The plain mean of the weights at several moments late in a run (Izmailov et al. 2018,
    arXiv:1803.05407).

    Attributes:
        start: when weights are taken first; a duration, see `phasetrain.optim.schedules.schedules`.
        every: how long until they are taken again; a duration.
        batches: training batches from which batch norm takes its statistics before each test.
        test: test it beside the trained weights.
    """

    start: float | str = 0.75
    every: float | str = "1 epochs"
    batches: int = 50
    test: bool = True

    def share(self, lengths: Mapping[str, int]) -> float:
        """Return the share of the training after which it is tested; 0 where the plan has to be
        known for that.

        Args:
            lengths: of the run, by the units in which it is given: `epochs`, `updates`, `samples`.
        """
        if not isinstance(self.start, str):
            return float(self.start)
        found = DURATION.fullmatch(self.start)
        total = {"%": 100, **lengths}.get(found["unit"], 0) if found else 0
        if found and total:
            return float(found["number"]) / total
        return 0.0


Settings = EMASettings | SWASettings


def settings_of(section: Mapping[str, Any]) -> dict[str, Settings]:
    """Return the averages that MODEL asks for, by name.

    Args:
        section: MODEL; `ema` and `swa` are null or mappings.

    Raises:
        ConfigError: a key or a value that they do not have.
    """
    found: dict[str, Settings] = {}
    for name, kind in (("ema", EMASettings), ("swa", SWASettings)):
        given = section.get(name)
        if given is not None:
            found[name] = kind(**_checked(kind, given, f"MODEL.{name}"))
    return found


def _checked(kind: type[Settings], given: Any, where: str) -> dict[str, Any]:
    known = [field.name for field in fields(kind)]
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where} = {given!r}: expected null, or a mapping with {', '.join(known)}"
        )
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{where}.{key}: no such key{did_you_mean(str(key), known) or '.'} It takes {known}"
            )
        fits, expected = _CHECKS[f"{kind.__name__}.{key}" if key == "every" else key]
        if not fits(value):
            raise ConfigError(f"{where}.{key} = {value!r}: expected {expected}")
    return dict(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_DURATION = (
    lambda value: _is_number(value) or isinstance(value, str),
    "a duration: a share of the run such as 0.75, or a text such as '5 epochs'",
)
_BOOL = (lambda value: isinstance(value, bool), "true or false")
_COUNT = (_is_count, "a whole number of at least 1")
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "decay": (
            lambda value: _is_number(value) and 0 <= value < 1,
            "a number in [0, 1), such as 0.999",
        ),
        "warmup": _BOOL,
        "test": _BOOL,
        "batches": _COUNT,
        "EMASettings.every": _COUNT,
        "SWASettings.every": _DURATION,
        "start": _DURATION,
    }
)
