"""Tensors in nested dicts, lists and tuples: batches, outputs, states."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(
    value: Any, change: Callable[[Any], Any], leaf: type = Tensor, *, any_mapping: bool = False
) -> Any:
    """Return `value` with every tensor in it changed; lists, tuples and dicts keep their form.

    Args:
        value: nested lists, tuples and dicts; anything else in it is kept.
        change: returns the new value.
        leaf: type of the changed objects, if not tensors.
        any_mapping: look into mappings of any class, which become dicts; otherwise those that are
            not dicts are kept.
    """
    if isinstance(value, leaf):
        return change(value)
    if isinstance(value, Mapping if any_mapping else dict):
        return {
            key: map_tensors(item, change, leaf, any_mapping=any_mapping)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [map_tensors(item, change, leaf, any_mapping=any_mapping) for item in value]
    if isinstance(value, tuple):
        items = [map_tensors(item, change, leaf, any_mapping=any_mapping) for item in value]
        if type(value) is tuple:
            return tuple(items)
        return type(value)(*items)  # a named tuple takes its fields one by one
    return value


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested mappings, lists and tuples, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    tensors = []
    for item in value:
        # Without a call for tensors and for what is absent, since this runs at every update.
        if isinstance(item, Tensor):
            tensors.append(item)
        elif item is not None:
            tensors += list_tensors(item)
    return tensors
