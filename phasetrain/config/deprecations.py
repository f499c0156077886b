"""Public names that have changed. The old ones work for two minor versions, with a warning.

`DEPRECATIONS` is the only place to declare a renamed config key, a renamed value (such as the name
of a part) or a renamed name of the Python API.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Deprecation:
    """One name that has changed.

    Attributes:
        old: dotted config key (`MODEL.width`), value of a key (`LOSS.name=nll`), or Python name
            (`phasetrain.fit`). `*` in a key is one label or split, as in `DATA.*.batch`.
        new: the same for the new name; `*` has the value that it has in the old name.
        since: version in which the new name appeared, `MAJOR.MINOR`.
        removed_in: first version without the old name, at least two minor versions later.
    """

    old: str
    new: str
    since: str
    removed_in: str

    @property
    def warning(self) -> str:
        """A sentence for the user."""
        return (
            f"{self.old}: renamed to {self.new} in {self.since}; the old name works until "
            f"{self.removed_in}"
        )


DEPRECATIONS: tuple[Deprecation, ...] = ()


def rename_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Deprecation]]:
    """Return a nested config with new names, and the entries that were needed.

    An old key next to its new one stays: the validation rejects it, as it does any unknown key.
    """
    renamed = _copy_mappings(values)
    used = []
    for entry in DEPRECATIONS:
        old, _, value = entry.old.partition("=")
        new, _, new_value = entry.new.partition("=")
        for keys, labels in _find_paths(renamed, old.split(".")):
            here = _fill_labels(new, labels)
            if value and _get_value(renamed, keys) != value:
                continue
            # A renamed value has the same key; only another key can be given twice.
            if here != ".".join(keys) and _get_value(renamed, here.split(".")) is not None:
                continue
            content = _pop_value(renamed, keys)
            _put_value(renamed, here.split("."), new_value or content)
            used.append(entry)
    # Consents name keys too, and would be refused as unknown.
    if used:
        _rename_allowed(renamed)
    return renamed, used


def _copy_mappings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as new dicts; other values may be large, and are not copied."""
    return {
        key: _copy_mappings(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def rename_path(path: str) -> str:
    """Return the present name of a dotted key."""
    for entry in DEPRECATIONS:
        labels = _match_pattern(path.split("."), entry.old.split("."))
        if labels is not None:
            return _fill_labels(entry.new, labels)
    return path


def restore_name(path: str, value: Any) -> tuple[str, Any]:
    """Return a key and its value as they were before they were renamed."""
    for entry in DEPRECATIONS:
        old, _, old_value = entry.old.partition("=")
        new, _, new_value = entry.new.partition("=")
        labels = _match_pattern(path.split("."), new.split("."))
        if labels is not None and (not new_value or value == new_value):
            return _fill_labels(old, labels), old_value or value
    return path, value


def find_python_name(name: str) -> Deprecation | None:
    """Return the entry of a name of the package that has changed, or None."""
    return next((entry for entry in DEPRECATIONS if entry.old == f"phasetrain.{name}"), None)


def _rename_allowed(values: dict[str, Any]) -> None:
    allowed = _get_value(values, ["RUN", "allow"])
    if isinstance(allowed, list):
        values["RUN"]["allow"] = [rename_path(str(key)) for key in allowed]


def _match_pattern(names: list[str], pattern: list[str]) -> list[str] | None:
    """Return the names at the places of `*`, or None if a path does not match."""
    if len(names) != len(pattern):
        return None
    pairs = list(zip(names, pattern, strict=True))
    if any(name != wanted for name, wanted in pairs if wanted != "*"):
        return None
    return [name for name, wanted in pairs if wanted == "*"]


def _fill_labels(pattern: str, labels: list[str]) -> str:
    rest = iter(labels)
    return ".".join(next(rest) if name == "*" else name for name in pattern.split("."))


def _find_paths(values: Any, pattern: list[str]) -> list[tuple[list[str], list[str]]]:
    """Return the paths that are in a nested mapping and match, and their names at `*`."""

    def walk(place: Any, path: list[str]) -> Iterator[list[str]]:
        if len(path) == len(pattern):
            yield path
        elif isinstance(place, Mapping):
            wanted = pattern[len(path)]
            for name in place:
                if wanted in ("*", name):
                    yield from walk(place[name], [*path, str(name)])

    return [(path, _match_pattern(path, pattern) or []) for path in walk(values, [])]


def _get_value(values: Any, path: list[str]) -> Any:
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _pop_value(values: dict[str, Any], path: list[str]) -> Any:
    for name in path[:-1]:
        values = values[name]
    return values.pop(path[-1])


def _put_value(values: dict[str, Any], path: list[str], content: Any) -> None:
    for name in path[:-1]:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[path[-1]] = content
