"""The settings `hydra.sweeper.prune`: how a sweep is pruned."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

from phasetrain.addons.experiments.sweep.override_text import PRUNE_KEY
from phasetrain.errors import ConfigError, did_you_mean

METHODS = ("halving", "hyperband")

KEYS = ("name", "eta", "min")

UNITS = ("epochs", "updates")

_LENGTH = re.compile(r"\s*(\d+)\s*(epoch|update)s?\s*")


@dataclass(frozen=True)
class PruneSettings:
    """How a sweep is pruned.

    Attributes:
        name: `halving` (successive halving) or `hyperband`.
        eta: at each rung one run of `eta` is promoted, and each rung is `eta` times as far as the
            one before.
        min: the first rung, in `unit`; None: it follows from the number of runs, see
            `phasetrain.addons.experiments.sweep.prune.rungs`.
        unit: `epochs` or `updates`; empty without `min`.
    """

    name: str
    eta: int = 3
    min: int | None = None
    unit: str = ""

    @classmethod
    def read(cls, overrides: Sequence[Override]) -> "PruneSettings | None":
        """Read overrides such as `hydra.sweeper.prune=halving`, `hydra.sweeper.prune.eta=4` or
        `hydra.sweeper.prune={name: halving, min: 2 epochs}`; None without any, or for null.

        Raises:
            ConfigError: an unknown method or key (`sweep.prune_unknown`), or a bad value
                (`sweep.prune_value`).
        """
        values: dict[str, Any] = {}
        for override in overrides:
            key = override.key_or_group.removeprefix(PRUNE_KEY).removeprefix(".")
            value = override.value()
            if key:
                values[key] = value
            elif isinstance(value, dict):
                values = {str(name): item for name, item in value.items()}
            elif value is None:  # takes back the settings before it
                values = {}
            else:
                values["name"] = value
        if not values:
            return None
        for key in values:
            if key not in KEYS:
                near = did_you_mean(key, KEYS) or "."
                raise ConfigError(
                    f"{PRUNE_KEY}.{key}: there is no such key{near} Known: {', '.join(KEYS)}",
                    code="sweep.prune_unknown",
                )
        name = values.get("name", METHODS[0])
        if name not in METHODS:
            near = did_you_mean(str(name), METHODS) or "."
            raise ConfigError(
                f"{PRUNE_KEY} = {name!r}: no such method{near} Known: {', '.join(METHODS)}",
                code="sweep.prune_unknown",
            )
        length, unit = _parse_length(values.get("min"))
        return cls(name, _parse_eta(values.get("eta", cls.eta)), length, unit)

    def describe_min(self) -> str:
        """Return the first rung as text, such as `2 epochs`; `auto` if it is not set."""
        if self.min is None:
            return "auto"
        return f"{self.min} {self.unit if self.min > 1 else self.unit.removesuffix('s')}"


def _parse_eta(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise ConfigError(
            f"{PRUNE_KEY}.eta = {value!r}: expected an integer of at least 2; with 3, every third "
            "run is promoted at each rung",
            code="sweep.prune_value",
        )
    return value


def _parse_length(value: Any) -> tuple[int | None, str]:
    if value is None:
        return None, ""
    match = _LENGTH.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) < 1:
        raise ConfigError(
            f"{PRUNE_KEY}.min = {value!r}: expected a number of epochs or updates, such as "
            "'1 epoch' or '200 updates'",
            code="sweep.prune_value",
        )
    return int(match[1]), f"{match[2]}s"
