"""Values that custom parts hold as attributes, module variables or closures, where a `state_dict`
may not see them."""

import functools
import pickle
import random
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from dis import get_instructions
from itertools import islice
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.distributed.dtensors import local_shard
from phasetrain.errors import is_user_file
from phasetrain.proof.digest import sum_bits, to_plain_key

TRUSTED = ("torch", "phasetrain", "numpy", *sys.stdlib_module_names)
"""Packages whose objects are not looked into."""

ENTRIES = 256
"""Number of entries of a container, and of sampled elements of a large array, that are compared."""

WHOLE = 2**16
"""Arrays with at most this many elements are compared whole."""

DEPTH = 3
"""Maximum depth of containers and objects within each other."""

GENERATORS = torch.Generator | np.random.Generator | random.Random

CACHED = functools._lru_cache_wrapper

PLAIN = bool | int | float | complex | str | bytes | np.generic


@dataclass(frozen=True)
class Held:
    """A value that a custom part holds.

    Attributes:
        part: label of the part.
        owner: object, class or module that has it; a function for a variable of its closure.
        name: its name there; empty for hooks of a module.
        key: what is compared, see `is_changed`.
        identity: id of the value; 0 for numbers and strings, which cannot change in place.
    """

    part: str
    owner: object
    name: str
    key: Any
    identity: int = 0


class Saved:
    """The objects and the memory that checkpoints contain.

    Args:
        modules: modules whose `state_dict` is saved.
        others: further objects that are saved.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[object] = ()) -> None:
        self.ids = {id(other) for other in others}
        self.memory: set[int] = set()
        for root in modules:
            for module in root.modules():
                self.ids.add(id(module))
                tensors = [*module.parameters(recurse=False)]
                buffers = module._buffers.items()
                skipped = module._non_persistent_buffers_set
                tensors += [b for name, b in buffers if b is not None and name not in skipped]
                self.ids |= set(map(id, tensors))
                self.memory |= {local_shard(tensor).data_ptr() for tensor in tensors}

    def __contains__(self, value: object) -> bool:
        if isinstance(value, Tensor) and local_shard(value).data_ptr() in self.memory - {0}:
            return True
        return id(value) in self.ids


def is_custom(kind: Any) -> bool:
    """Return whether a class, function or module is the user's, or a class of modules or optimizers
    of another package."""
    name = kind.__name__ if isinstance(kind, ModuleType) else getattr(kind, "__module__", None)
    if not isinstance(name, str) or (name.partition(".")[0] in TRUSTED and name != "__main__"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or is_user_file(file):
        return True
    return isinstance(kind, type) and issubclass(kind, nn.Module | Optimizer)


def find_holders(roots: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return the custom objects and functions that can be reached from objects, with the label of
    the first root that leads to them."""
    roots = list(roots)
    found: list[tuple[str, object]] = []
    seen: set[int] = set()
    first = {id(root) for _, root in roots}
    for label, root in roots:
        left = [root]
        while left:
            value = left.pop()
            if id(value) in seen or (id(value) in first and value is not root):
                continue
            seen.add(id(value))
            if isinstance(value, FunctionType):
                if is_custom(value):
                    found.append((label, value))
                left += [cell for _, cell in _list_cells(value)]
            elif isinstance(value, dict):
                left += islice(value.values(), ENTRIES)
            elif isinstance(value, list | tuple | set | deque):
                left += islice(value, ENTRIES)
            elif isinstance(value, functools.partial):
                left += [value.func, *value.args, *value.keywords.values()]
            elif isinstance(value, MethodType):
                left.append(value.__self__)
            elif isinstance(value, Tensor | type | ModuleType) or not hasattr(value, "__dict__"):
                continue
            else:
                package = type(value).__module__.partition(".")[0]
                if is_custom(type(value)):
                    found.append((label, value))
                elif package not in ("torch", "phasetrain"):
                    continue
                left += vars(value).values()
                functions = vars(type(value)).values()
                left += [f for f in functions if isinstance(f, FunctionType) and f.__closure__]
    return found


def list_modules(holders: Iterable[tuple[str, object]]) -> list[ModuleType]:
    """Return the custom modules that define the holders, and those whose names they import."""
    left: list[Any] = []
    for _, holder in holders:
        left += [holder] if isinstance(holder, FunctionType) else type(holder).__mro__
    found: dict[str, ModuleType] = {}
    while left:
        value = left.pop()
        is_named = isinstance(value, type | FunctionType | ModuleType) and is_custom(value)
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        if is_named and name not in found and name in sys.modules:
            found[name] = sys.modules[name]
            left += vars(found[name]).values()
    return list(found.values())


def read_held(
    holders: Iterable[tuple[str, object]],
    modules: Iterable[ModuleType],
    saved: Saved,
    *,
    is_whole: bool = False,
) -> dict[str, Held]:
    """Return every comparable value of holders and of module variables by its path.

    Args:
        holders: see `find_holders`.
        modules: modules whose variables, and the variables of whose classes, are read.
        saved: what is left out, because checkpoints contain it.
        is_whole: compare large arrays by all their bits and not by their version counter.
    """
    holders = list(holders)
    reader = _Reader(saved, {id(holder) for _, holder in holders}, is_whole=is_whole)
    held: dict[str, Held] = {}
    counts: dict[tuple[str, str], int] = {}
    for part, owner in [*holders, *_list_classes(modules)]:
        kind = owner if isinstance(owner, FunctionType | ModuleType | type) else type(owner)
        class_name = kind.__name__
        number = counts[part, class_name] = counts.get((part, class_name), 0) + 1
        for name, value in _list_values(owner):
            if value is None or value in saved:
                continue
            key = reader.read(value, DEPTH)
            if key is not None:
                identity = 0 if isinstance(value, PLAIN) else id(value)
                path = f"{part}:{class_name}{number}.{name}"
                held[path] = Held(part, owner, name, key, identity)
    return held


class ModuleVariables:
    """The plain variables of modules and of their classes, to be set back.

    Args:
        modules: the modules; their caches are emptied by `restore`.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._before = [
            (owner, name, value, copy(value))
            for _, owner in _list_classes(modules)
            for name, value in _list_values(owner)
            if isinstance(value, PLAIN | dict | list | set | GENERATORS | CACHED)
        ]

    def restore(self) -> None:
        """Set all variables and the content of containers back."""
        for owner, name, value, kept in self._before:
            if isinstance(value, CACHED):
                value.cache_clear()
            elif isinstance(value, torch.Generator):
                value.set_state(kept.get_state())
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = kept.bit_generator.state
            elif isinstance(value, random.Random):
                value.setstate(kept.getstate())
            elif isinstance(value, list):
                value[:] = kept
            elif isinstance(value, dict | set):
                value.clear()
                value.update(kept)
            elif not isinstance(owner, FunctionType) and vars(owner).get(name) is not value:
                setattr(owner, name, value)


def is_changed(before: Any, after: Any) -> bool:
    """Return whether a value has changed, by its keys; growing caches have not: entries that
    appear or disappear in a mapping, and entries of a list that were None."""
    if isinstance(before, dict) and isinstance(after, dict):
        return any(is_changed(before[name], after[name]) for name in before.keys() & after.keys())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return any(one is not None and is_changed(one, other) for one, other in pairs)
    return bool(before != after)


def _list_classes(modules: Iterable[ModuleType]) -> Iterator[tuple[str, object]]:
    for module in modules:
        yield "", module
        for value in list(vars(module).values()):
            is_local = getattr(value, "__module__", None) == module.__name__
            if is_local and isinstance(value, type | FunctionType):
                yield "", value


def _list_values(owner: object) -> Iterator[tuple[str, Any]]:
    """Yield the values that a holder, a class, a module or a function has by itself."""
    if isinstance(owner, FunctionType):
        yield from _list_cells(owner)
        yield from vars(owner).items()
        yield from _list_defaults(owner)
        return
    values = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, nn.Module):
        skipped = owner._non_persistent_buffers_set
        values |= {name: value for name, value in owner._buffers.items() if name in skipped}
    own = frozenset() if isinstance(owner, type | ModuleType) else _list_own_names(type(owner))
    for name, value in values.items():
        is_code = isinstance(value, type | ModuleType | MethodType)
        is_function = isinstance(value, FunctionType) and isinstance(owner, type | ModuleType)
        if name in own or name.startswith("__") or is_code or is_function:
            continue
        yield name, value


def _list_cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _list_defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of the last positional arguments, which a function may change."""
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(names[len(names) - len(values) :], values, strict=True)


@functools.cache
def _list_own_names(kind: type) -> frozenset[str]:
    """Return the names of the attributes that trusted base classes set."""
    names = {*vars(nn.Module()), "__dict__"} if issubclass(kind, nn.Module) else set()
    for base in kind.__mro__:
        if not is_custom(base):
            for function in vars(base).values():
                if isinstance(function, FunctionType):
                    names |= {
                        str(code.argval)
                        for code in get_instructions(function)
                        if code.opname == "STORE_ATTR"
                    }
    return frozenset(names)


class _Reader:
    """Makes the key of a value."""

    def __init__(self, saved: Saved, listed: set[int], *, is_whole: bool) -> None:
        self._saved = saved
        self._listed = listed
        self._is_whole = is_whole

    def read(self, value: Any, depth: int) -> Any:  # noqa: C901, PLR0912 - one case a kind
        """Return what is compared; None if there is nothing."""
        if value is None or id(value) in self._listed or value in self._saved or depth < 0:
            return None
        if isinstance(value, PLAIN):
            return to_plain_key(value)
        if isinstance(value, Tensor):
            return self._read_tensor(value)
        if isinstance(value, np.ndarray):
            return self._read_array(value)
        state = _read_generator(value)
        if state is not None:
            return state
        if isinstance(value, dict):
            items = islice(value.items(), ENTRIES)
            return {str(name): self.read(item, depth - 1) for name, item in items}
        if isinstance(value, list | tuple | deque):
            entries = [self.read(item, depth - 1) for item in islice(value, ENTRIES)]
            return [*entries, *([len(value)] if len(value) > ENTRIES else [])]
        if isinstance(value, set | frozenset):
            return len(value), tuple(sorted(map(repr, islice(value, ENTRIES))))
        if isinstance(value, nn.Module):
            tensors = [*value.named_parameters(), *value.named_buffers()]
            return {name: self.read(tensor, depth) for name, tensor in tensors}
        if isinstance(value, FunctionType):
            return {name: self.read(item, depth - 1) for name, item in _list_cells(value)}
        if isinstance(value, CACHED):
            # With arguments it may be a cache that grows.
            code = getattr(value.__wrapped__, "__code__", None)
            return value.cache_info().currsize if code and not code.co_argcount else None
        if isinstance(value, Iterator):
            return self._read_iterator(value, depth)
        if hasattr(type(value), "state_dict"):
            return self.read(value.state_dict(), depth)
        if is_custom(type(value)):
            return {name: self.read(item, depth - 1) for name, item in _list_values(value)}
        return None

    def _read_tensor(self, tensor: Tensor) -> Any:
        tensor = local_shard(tensor.detach())
        if tensor.is_meta or tensor.layout != torch.strided:
            return str(tensor.shape), tensor._version
        if self._is_whole or tensor.numel() <= WHOLE:
            return str(tensor.dtype), tuple(tensor.shape), int(sum_bits(tensor)), _hash(tensor)
        sample = tensor.flatten()[:: tensor.numel() // ENTRIES]
        return tuple(tensor.shape), tensor._version, _hash(sample)

    def _read_array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.hasobject:
            return array.shape
        if not self._is_whole and array.size > WHOLE:
            array = array.reshape(-1)[:: array.size // ENTRIES]
        return str(array.dtype), array.shape, crc32(np.ascontiguousarray(array).tobytes())

    def _read_iterator(self, value: Iterator[Any], depth: int) -> Any:
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            if frame is None:
                return "exhausted"
            names = {name: self.read(item, depth - 1) for name, item in frame.f_locals.items()}
            return frame.f_lasti, tuple(names.items())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # itertools, from Python 3.12 on
            try:
                return crc32(pickle.dumps(value))
            except Exception:  # noqa: BLE001 - it cannot be compared, such as a file
                return None


def _hash(tensor: Tensor) -> int:
    return crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read_generator(value: Any) -> Any:
    """Return the state of a generator of random numbers; None for another object."""
    if isinstance(value, torch.Generator):
        return crc32(value.get_state().numpy().data)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    return None


def read_key(value: Any) -> Any:
    """Return the key of a nested state."""
    return _Reader(Saved(()), set(), is_whole=False).read(value, 2 * DEPTH)


def read_setup(module: nn.Module) -> Any:
    """Return the number of hooks registered on a module, and the options of a module of torch, such
    as the probability of a dropout."""
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    options = ()
    if type(module).__module__.startswith("torch."):
        values = vars(module).items()
        options = tuple(
            (name, to_plain_key(value))
            for name, value in values
            if isinstance(value, PLAIN) and name != "training"
        )
    return hooks + len(module._backward_hooks), options
