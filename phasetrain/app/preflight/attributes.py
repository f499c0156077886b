"""Digests of the plain Python attributes of parts, where no checkpoint sees it."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.meters import Meter
from phasetrain.proof.digest import digest_leaves
from phasetrain.tasks import Task

TRUSTED = ("torch", "phasetrain", "numpy", "builtins", "collections", "functools")
"""Packages whose objects are not looked into."""

DEPTH = 3
"""Maximum depth of objects within objects."""


def digest_attributes(task: Task) -> dict[str, str]:
    """Return a digest of each plain attribute of the custom parts of a task, by part and path.

    These are numbers, strings, tensors, arrays, generators, and containers and objects of them.
    """
    digests: dict[str, str] = {}
    for part, holder in _list_holders(task):
        for path, value in _walk(holder, DEPTH):
            digests[f"{part}:{path}"] = repr(digest_leaves(value, ""))
    return digests


def _list_holders(task: Task) -> Iterator[tuple[str, object]]:
    yield "task", task
    for name, part in task.stateful().items():
        if isinstance(part, Meter) or not isinstance(part, nn.Module):
            yield name, part
            continue
        for module_name, module in part.named_modules():
            yield f"{name}:{module_name}".rstrip(":"), module
    for name, updater in task.updaters.items():
        yield f"optimizer.{name}", updater.optimizer


def _walk(holder: object, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the plain attributes of an object of a custom class."""
    if type(holder).__module__.partition(".")[0] in TRUSTED:
        return
    try:
        attributes = vars(holder)
    except TypeError:  # it has slots
        return
    own = _list_own_attributes(holder)
    for name, value in attributes.items():
        if name in own:
            continue
        state = _plain_state(value)
        if state is not None:
            yield name, state
        elif depth and not isinstance(value, nn.Module | Optimizer | type):
            for path, below in _walk(value, depth - 1):
                yield f"{name}.{path}", below


def _list_own_attributes(holder: object) -> frozenset[str]:
    """Return the names of the attributes that torch itself sets."""
    if isinstance(holder, nn.Module):
        return frozenset(vars(nn.Module()))
    if isinstance(holder, Optimizer):
        own = vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))
        return frozenset({*own, "_need_device_dtype_check_for_fused"})
    return frozenset()


def _plain_state(value: Any) -> Any:
    """Return the comparable part of a value; None if there is none."""
    if isinstance(value, bool | int | float | complex | str | Tensor | np.ndarray | np.generic):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, Mapping):
        items = {str(key): _plain_state(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None} or len(items)
    if isinstance(value, list | tuple):
        return [_plain_state(item) for item in value] or 0
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value)) or 0
    return None
