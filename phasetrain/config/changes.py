"""Differences between configs, and the digest of the keys that affect the trajectory."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Final

from phasetrain.config.deprecations import rename_keys, restore_name
from phasetrain.config.nested import leaves, to_plain
from phasetrain.config.schema import LABELLED, PARTS, WORDS, Schema, part_pattern
from phasetrain.config.sections import Resume
from phasetrain.config.sections.keys import join_path


# An Enum, since mypy then narrows comparisons by `is`, and null is a value of the config.
class _Absent(Enum):
    ABSENT = "absent"

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent.ABSENT
LABELS = tuple(f"{mapping}.*" for mapping in ("DATA", *LABELLED))
"""Places that are added or removed as a whole."""


@dataclass(frozen=True)
class Change:
    """One leaf that differs.

    Attributes:
        path: dotted path; a list is one leaf.
        old: the value before, or `ABSENT`.
        new: the value now, or `ABSENT`.
        resume: class of the key for resume.
    """

    path: str
    old: Any
    new: Any
    resume: Resume


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any], schema: Schema) -> list[Change]:
    """Return the leaves that differ between two configs, in the order of the keys.

    A key that is missing in one of them counts as its default, since a newer version may have added
    it. Numbers are compared by value (1.0 is 1), lists item by item. A label or split that only one
    config has is one change. Renamed keys are compared by their new names.
    """
    return list(_compare(rename_keys(old)[0], rename_keys(new)[0], "", schema))


def trajectory_digest(config: Mapping[str, Any], schema: Schema) -> str:
    """Return 8 hex digits of blake2b over the canonical JSON of all keys that are not `free`.

    The order of keys does not matter, and 1.0 is 1. Keys at their default are left out, so that a
    key added by a newer version does not move a run to another folder; names of parts always count.
    For the same reason, a renamed key counts by its old name.
    """
    # `collate: stack` and `collate: {name: stack}` are the same run.
    words = {
        path
        for path, value in leaves(config).items()
        if isinstance(value, str) and part_pattern(path) in WORDS
    }
    shaping = {
        f"{old_path}.name" if path in words else old_path: _canonical(old_value)
        for path, value in leaves(config).items()
        for old_path, old_value in [restore_name(path, value)]
        # Free keys do not affect the trajectory: with more workers or another hook it is the same
        # run, which continues in the same folder.
        if schema.resume(path) != "free"
        and (_is_name(path) or not _is_default(path, value, schema))
    }
    return blake2b(json.dumps(shaping, sort_keys=True).encode(), digest_size=4).hexdigest()


def _compare(
    old: Mapping[str, Any], new: Mapping[str, Any], path: str, schema: Schema
) -> Iterator[Change]:
    for name in {**old, **new}:
        here = join_path(path, name)
        before, after = (_value_or_default(side, name, here, schema) for side in (old, new))
        if part_pattern(here) not in LABELS and isinstance(before, Mapping) != isinstance(
            after, Mapping
        ):
            # Compared key by key, so that a key of the mapping at its default is not a change.
            before, after = ({} if side is ABSENT else side for side in (before, after))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _compare(before, after, here, schema)
        elif _canonical(before) != _canonical(after):
            yield Change(here, before, after, schema.resume(here))


def _value_or_default(side: Mapping[str, Any], name: str, path: str, schema: Schema) -> Any:
    if name in side:
        return _expand_name(path, side[name])
    key = schema.key(path)
    if key is not None and part_pattern(path) not in LABELS:
        return _expand_name(path, key.default)
    return ABSENT


def _expand_name(path: str, value: Any) -> Any:
    """Return `{name: stack}` for `stack` at places where both mean the same."""
    if isinstance(value, str) and part_pattern(path) in WORDS:
        return {"name": value}
    return value


def _is_name(path: str) -> bool:
    parent, _, last = path.rpartition(".")
    pattern = part_pattern(parent)
    return part_pattern(path) is not None or (pattern is not None and PARTS[pattern] == last)


def _is_default(path: str, value: Any, schema: Schema) -> bool:
    key = schema.key(path)
    return key is not None and _canonical(value) == _canonical(key.default)


def _canonical(value: Any) -> Any:
    # Tuples of a frozen config equal the lists of a config read from JSON.
    return to_plain(value, _to_canonical_number, text_keys=True)


def _to_canonical_number(value: Any) -> Any:
    # YAML reads 1 and 1.0 as different types; as the value of a parameter they are equal.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
