"""Walks over the values of a config: nested mappings, lists, numbers and texts."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phasetrain.config.sections.keys import join_path


def leaves(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return dotted path -> value of each leaf, in order; lists and empty mappings are leaves."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        here = join_path(path, key)
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, here)
        else:
            flat[here] = value
    return flat


def iter_texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) of all texts in nested mappings and lists, such as `("A.b[0]", "x")`."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from iter_texts(item, join_path(path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from iter_texts(item, f"{path}[{index}]")


def to_plain(
    value: Any, change: Callable[[Any], Any] | None = None, *, text_keys: bool = False
) -> Any:
    """Return nested mappings, lists and tuples as new dicts and lists.

    Args:
        value: the value.
        change: returns the new value of everything else in it; None keeps it.
        text_keys: turn keys into texts, as in JSON.
    """
    if isinstance(value, Mapping):
        return {
            str(key) if text_keys else key: to_plain(item, change, text_keys=text_keys)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_plain(item, change, text_keys=text_keys) for item in value]
    return value if change is None else change(value)


def to_json_value(value: Any) -> Any:
    """Return a value as JSON can hold it: infinite and NaN numbers become null, objects a text."""
    return to_plain(value, _to_json_scalar, text_keys=True)


def _to_json_scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
