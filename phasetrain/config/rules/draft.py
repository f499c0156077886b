"""The config while rules derive values in it."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import lookup, origin_of
from phasetrain.config.problems import format_value
from phasetrain.errors import Problem


class ConfigDraft:
    """A copy of a composed config, with the values that rules have derived up to now.

    Attributes:
        config: the values.
        lines: one line per derived value: `SECTION.key: a -> b (why)`.
        problems: mistakes that rules have found.
        experiment: name of the experiment.

    Args:
        composed: the config.
        find_device: returns the device that replaces `MACHINE.device: auto`.
    """

    def __init__(self, composed: Composed, find_device: Callable[[], str]) -> None:
        # A copy, since rules also look at the values as they were given.
        self.config: dict[str, Any] = deepcopy(composed.config)
        self.lines: list[str] = []
        self.problems: list[Problem] = []
        self.experiment = composed.experiment
        self._find_device = find_device
        self._given: Mapping[str, Any] = composed.config
        self._origins = composed.origins
        self._layers = composed.layers

    @cached_property
    def device(self) -> str:
        """MACHINE.device, with `auto` replaced: rules ask for it last, because it imports torch."""
        name: str = self.config["MACHINE"]["device"]
        return self._find_device() if name == "auto" else name

    def set(self, path: str, value: Any, why: str) -> None:
        """Set a derived value, and write the line about it."""
        parent, _, name = path.rpartition(".")
        section = lookup(self.config, parent)
        self.lines.append(
            f"{path}: {format_value(section.get(name))} -> {format_value(value)} ({why})"
        )
        section[name] = value

    def reject(self, key: str, message: str, code: str = "config.conflict") -> None:
        """Add a problem; the message begins with the key."""
        self.problems.append(Problem.from_message(message, code, key))

    def get(self, path: str) -> Any:
        """Return the value at a path as derived up to now; None if there is none."""
        return lookup(self.config, path)

    def get_given(self, path: str) -> Any:
        """Return the value at a path before any rule was applied; None if there is none."""
        return lookup(self._given, path)

    def layer_of(self, path: str) -> str:
        """Return the layer that set a path."""
        return origin_of(self._origins, path)

    def rank_of(self, path: str) -> int:
        """Return the position of the layer that set a path; higher layers have a higher one."""
        # The last occurrence counts: several defaults lists may name the same file.
        return len(self._layers) - 1 - self._layers[::-1].index(self.layer_of(path))

    def check_divides(self, path: str, part: int, whole_path: str, whole: int) -> bool:
        """Return whether `part` divides `whole`; if not, reject it with the nearest divisors."""
        if whole % part == 0:
            return True
        near = list_numbers(nearest_divisors(whole, part))
        self.reject(
            path,
            f"{path} = {part} ({self.layer_of(path)}) does not divide {whole_path} = {whole} "
            f"({whole} = {whole // part} x {part} + {whole % part}); nearest that work: {near}",
            "config.indivisible",
        )
        return False


def nearest_divisors(whole: int, part: int) -> list[int]:
    """Return the largest divisor of `whole` below `part` and the smallest above, if they exist.

    Example:
        >>> nearest_divisors(64, 3)
        [2, 4]
    """
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < part]
    above = [n for n in divisors if n > part]
    return below[-1:] + above[:1]


def list_numbers(numbers: Sequence[int]) -> str:
    """Return numbers separated by commas."""
    return ", ".join(map(str, numbers))
