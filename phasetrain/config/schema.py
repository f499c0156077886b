"""Look-up of keys by dotted path: their definitions, defaults and classes for resume."""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy, deepcopy
from functools import cache
from types import MappingProxyType
from typing import Any

from phasetrain.config.sections.extended import complete_config
from phasetrain.config.sections.keys import Key, Resume, Scope, walk_section
from phasetrain.config.sections.optimizer import SCHEDULED

DEFAULTS = "defaults.yaml"
"""Name of the lowest layer: the defaults of all keys."""

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "DATA.*": "dataset",
        "DATA.*.datasets.*": "dataset",
        "DATA.*.sampler": "name",
        "DATA.*.collate": "name",
        "DATA.*.loader": "name",
        "TASK": "name",
        "MODEL": "name",
        "LOSS": "name",
        "METERS.*": "name",
        "OPTIMIZER": "name",
        "OPTIMIZER.scaler": "name",
        "OPTIMIZER.SCHEDULES.*": "name",
        "OPTIMIZER.others.*": "name",
        "OPTIMIZER.others.*.SCHEDULES.*": "name",
        "DISTRIBUTED": "strategy",
        "HOOKS.*": "name",
    }
)
"""Places where a name chooses a part -> the key of the name. `*` is one label or data split.

The registry of each place is in `phasetrain.app.slots.list_slots`.
"""

WORDS = (
    "DATA.*.sampler",
    "DATA.*.collate",
    "DATA.*.loader",
    "OPTIMIZER.scaler",
    *(f"{place}.SCHEDULES.*" for place in SCHEDULED),
)
"""Places where a plain name is short for a mapping with the name."""

LABELLED = ("METERS", "HOOKS", "OPTIMIZER.SCHEDULES", "OPTIMIZER.others")
"""Mappings from a label to a part; null empties them."""

FREE = ("DISTRIBUTED",)
"""Sections whose parts do not change the trajectory, or only its rounding."""

ROUNDING = ("DISTRIBUTED.param_dtype", "DISTRIBUTED.reduce_dtype")
"""Parameters of fsdp that change more than the last bits, so that a change needs consent."""

DEFAULT_NAMES = ("METERS.*", "HOOKS.*", "LOSS.losses.*")
"""Places where the label is the default name."""


# Users choose names of test splits; upper case tells them from the keys of DATA.
_SPLIT = re.compile(r"[A-Z][A-Z0-9_]*$")


class Schema:
    """All keys with types and classes for resume; also classifies paths that belong to parts.

    Args:
        root: dataclass whose fields are the sections; by default all sections of the core and of
            the installed add-ons.

    Attributes:
        keys: dotted path -> key, in order.
        defaults: nested plain mapping of the defaults.
        sections: names of the sections.
        observers: labels of the hooks that only observe the run; None: the hooks that are on by
            default, as long as no config says more.
    """

    observers: frozenset[str] | None = None

    def __init__(self, root: type | None = None) -> None:
        root = root or complete_config()
        self.keys: Mapping[str, Key] = MappingProxyType({key.path: key for key in _keys(root, "")})
        # Made from the fields that define the keys, so that every key has exactly one default.
        self.defaults: dict[str, Any] = _defaults(root)
        self.sections = tuple(self.defaults)

    def key(self, path: str) -> Key | None:
        """Return the key at a dotted path, or None; all splits except DATA.TRAIN have the keys of
        DATA.TEST."""
        return self.keys.get(_as_known(path))

    def with_observers(self, labels: Iterable[str]) -> "Schema":
        """Return the same keys, with the labels of the hooks that only observe the run."""
        schema = copy(self)
        schema.observers = frozenset(labels)
        return schema

    def has(self, path: str) -> bool:
        """Return whether a path is a key or a group of keys; all others belong to parts."""
        return self.key(path) is not None or bool(self.children(path))

    def children(self, path: str) -> tuple[str, ...]:
        """Return the names of the keys and groups of keys directly below a path, in order; `""`
        gives the sections."""
        if self.key(path) is not None:
            return ()
        node: Any = self.defaults
        for part in filter(None, _as_known(path).split(".")):
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            return tuple(node)
        return ()

    def problem(self, path: str, value: Any) -> str | None:
        """Return `expected int >= 1` if the value does not fit the key at `path`, else None."""
        key = self.key(path)
        if key is None or key.type.fits(value):
            return None
        return f"expected {key.type.text}"

    def resume(self, path: str) -> Resume:
        """Return the class for resume of any dotted path; parameters of parts are forbidden to
        change except in FREE, and except parameters of hooks."""
        section = path.partition(".")[0]
        if path in ROUNDING:
            return "adjustable"
        if section == "HOOKS":
            return self._resume_of_hook(path)
        key = self._find_key(path)
        if key is not None:
            return key.resume
        if section in FREE:
            return "free"
        return "forbidden"

    def scope(self, path: str) -> Scope:
        """Return the scope of any dotted path; parameters of parts belong to the result."""
        key = self._find_key(path)
        return "result" if key is None else key.scope

    def is_of_one_run(self, path: str) -> bool:
        """Return whether any two runs may differ in a key: its name, and keys of one command."""
        return path == "RUN.name" or self.scope(path) == "command"

    def _find_key(self, path: str) -> Key | None:
        """Return the key at a dotted path, or the key that the path is below, as
        OPTIMIZER.SCHEDULES.lr.end is; None for parameters of parts."""
        while path:
            key = self.key(path)
            if key is not None:
                return key
            path = path.rpartition(".")[0]
        return None

    def _resume_of_hook(self, path: str) -> Resume:
        label = path.split(".")[1:2]
        if self.observers is None:
            is_free = not label or f"HOOKS.{label[0]}" in self.keys
        else:
            is_free = not label or label[0] in self.observers
        if is_free:
            return "free"
        # The hook may change weights or end the run.
        return "adjustable"


@cache
def default_schema() -> Schema:
    """Return the schema of all sections."""
    return Schema()


@cache
def part_pattern(path: str) -> str | None:
    """Return the pattern in `PARTS` that a dotted path matches, or None."""
    return next((pattern for pattern in PARTS if matches(path, pattern)), None)


def matches(path: str, pattern: str) -> bool:
    """Return whether a dotted path fits a pattern in which `*` is one label; below DATA it is an
    upper-case split."""
    names = path.split(".")
    wanted = pattern.split(".")
    if len(names) != len(wanted) or any(
        w not in ("*", n) for n, w in zip(names, wanted, strict=True)
    ):
        return False
    return names[0] != "DATA" or len(names) < 2 or is_split(names[1])


def is_split(name: str) -> bool:
    """Return whether a key of DATA is the name of a split: upper case."""
    return _SPLIT.match(name) is not None


def _as_known(path: str) -> str:
    names = path.split(".")
    # The defaults have two splits; any further test split has the keys of DATA.TEST.
    if names[0] == "DATA" and len(names) > 1 and names[1] != "TRAIN" and is_split(names[1]):
        names[1] = "TEST"
    return ".".join(names)


def _keys(section: Any, path: str) -> Iterator[Key]:
    for here, key, below in walk_section(section, path):
        if key is None:
            yield from _keys(below, here)
        else:
            yield key


def _defaults(section: Any) -> dict[str, Any]:
    return {
        name: _defaults(below) if key is None else deepcopy(key.default)
        for name, key, below in walk_section(section, "")
    }
