"""Values that custom parts hold as attributes, module variables or closures, where a `state_dict`
may not see them."""

import functools
import logging
import pickle
import random
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from dis import get_instructions, opmap
from itertools import islice, pairwise
from types import CellType, FunctionType, GeneratorType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.distributed.dtensors import local_shard
from phasetrain.errors import is_user_file
from phasetrain.proof.digest import to_plain_key, view_bytes

log = logging.getLogger(__name__)

TRUSTED = ("torch", "phasetrain", "numpy", "fairscale", *sys.stdlib_module_names)
"""Packages whose objects are not looked into. The state of fairscale's wrappers is saved by the
strategy; asking a sharded optimizer for it raises, unless all ranks have gathered it."""

ENTRIES = 256
"""Number of entries of a container, and of sampled elements of a large array, that are compared."""

WHOLE = 2**16
"""Arrays with at most this many elements are compared whole."""

DEPTH = 3
"""Maximum depth of containers and objects within each other."""

CACHED = functools._lru_cache_wrapper

CONTAINERS = (list, dict, set, defaultdict, OrderedDict)
"""Classes whose copies have the same entries; a subclass may do anything."""

STORE = opmap["STORE_ATTR"]

PLAIN = bool | int | float | complex | str | bytes | np.generic


_NOTHING_BELOW = frozenset({bool, int, float, str, bytes, type(None)})
"""Classes of values that lead to no holder; half of all values that can be reached."""

Holder = tuple[str, object]
"""The label of a part, and an object that it consists of."""


@dataclass(frozen=True)
class Held:
    """A value that a custom part holds.

    Attributes:
        part: label of the part.
        owner: object, class or module that has it; a function for a variable of its closure.
        name: its name there; empty for the hooks of a module.
        key: the value that is compared, see `is_changed`.
        identity: id of the value; 0 for numbers, texts and tuples.
        kind: `option` of a class of torch or phasetrain, which reads it, `container` (a list or
            dict, whose changes the source may show), or empty.
    """

    part: str
    owner: object
    name: str
    key: Any
    identity: int = 0
    kind: str = ""


class Saved:
    """The objects and the memory that checkpoints contain.

    Args:
        modules: modules whose `state_dict` is saved.
        others: further objects that are saved.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), others: Iterable[object] = ()) -> None:
        self._ids = set(map(id, others))
        self._memory: set[int] = set()
        for module in (module for root in modules for module in root.modules()):
            self._ids.add(id(module))
            skipped = module._non_persistent_buffers_set
            tensors = {**module._parameters, **module._buffers}.items()
            self._memory |= {
                local_shard(tensor).data_ptr()
                for name, tensor in tensors
                if tensor is not None and name not in skipped
            }
        self._memory.discard(0)

    def __contains__(self, value: object) -> bool:
        if isinstance(value, Tensor) and local_shard(value).data_ptr() in self._memory:
            return True
        return id(value) in self._ids


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


def find_holders(roots: Iterable[Holder]) -> list[Holder]:
    """Return the custom objects and functions that can be reached from objects, with the label of
    the first root that leads to them."""
    roots = list(roots)
    is_custom_kind = functools.cache(is_custom)
    found: list[Holder] = []
    seen: set[int] = set()
    first = {id(root) for _, root in roots}
    for label, root in roots:
        left = [root]
        while left:
            value = left.pop()
            kind = find_kind(value)
            is_passed = kind in _NOTHING_BELOW or id(value) in seen
            is_passed = is_passed or (id(value) in first and value is not root)
            # A resume reads such data again up to its position, or restores that.
            is_passed |= (
                label.startswith("data.") and is_custom_kind(kind) and hasattr(kind, "__iter__")
            )
            if is_passed or isinstance(value, type | ModuleType):
                continue
            seen.add(id(value))
            if is_custom_kind(kind):
                found.append((label, value))
            if isinstance(value, list | tuple | set | deque):
                left += islice(value, ENTRIES)
            elif isinstance(value, dict):
                left += islice(value.values(), ENTRIES)
            elif isinstance(value, FunctionType):
                left += _list_cells(value).values()
            elif is_custom_kind(kind) or kind.__module__.startswith(("torch.", "phasetrain.")):
                # An object that is computed again is no holder either.
                skipped = getattr(value, "recomputed", ())
                values = getattr(value, "__dict__", {}).items()
                left += [inner for name, inner in values if name not in skipped]
                left += [f for f in vars(kind).values() if getattr(f, "__closure__", None)]
            elif isinstance(value, functools.partial):
                left += [value.func, *value.args, *value.keywords.values()]
    return found


def find_kind(value: object) -> Any:
    """Return a function, class or module itself, and the class of another object."""
    return value if isinstance(value, FunctionType | ModuleType | type) else type(value)


def list_kinds(holders: Iterable[Holder]) -> list[Any]:
    """Return the functions among holders, and the classes of all others with their bases."""
    kinds: dict[Any, None] = {}
    for _, holder in holders:
        kind = find_kind(holder)
        kinds |= dict.fromkeys(getattr(kind, "__mro__", [kind]))
    return [kind for kind in kinds if is_custom(kind)]


def list_modules(kinds: Iterable[Any]) -> list[ModuleType]:
    """Return the custom modules that define classes and functions, and those whose names they
    import."""
    left = list(kinds)
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
    holders: Iterable[Holder],
    modules: Iterable[ModuleType],
    saved: Saved,
    *,
    is_whole: bool = False,
) -> dict[str, Held]:
    """Return every comparable value of holders and of module variables by its path.

    Args:
        holders: see `find_holders`.
        modules: modules whose variables are read, with the variables of their classes.
        saved: values to skip, because checkpoints contain them or they are holders.
        is_whole: compare large arrays by all their bits, and not by a sample and their version.
    """
    held: dict[str, Held] = {}
    counts: dict[str, int] = {}
    for part, owner in [*holders, *(("", owner) for owner in list_owners(modules))]:
        label = f"{part}:{find_kind(owner).__name__}"
        counts[label] = counts.get(label, 0) + 1
        for name, value in list_values(owner).items():
            try:
                key = read_key(value, saved, is_whole=is_whole)
            except Exception as error:  # noqa: BLE001 - code of the user, such as a property
                log.debug("%s: %s cannot be compared: %s", label, name, error)
                continue
            if key is not None:
                identity = 0 if isinstance(value, PLAIN | tuple) else id(value)
                path = f"{label}{counts[label]}.{name}"
                kind = "container" if isinstance(value, dict | list) else ""
                held[path] = Held(part, owner, name, key, identity, kind)
    return held


def is_changed(before: Any, after: Any) -> bool:
    """Return whether a value has changed, by its keys; growing caches have not: entries that
    appear or disappear in a mapping, and entries of a list that were None."""
    if isinstance(before, dict) and isinstance(after, dict):
        return any(is_changed(before[name], after[name]) for name in before.keys() & after.keys())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return any(one is not None and is_changed(one, other) for one, other in pairs)
    return bool(before != after)


def keep_variables(modules: Iterable[ModuleType]) -> Callable[[], None]:
    """Return a function that sets the numbers, texts and containers among the variables of the
    user's modules and of their classes back, and empties their caches."""
    custom = (module for module in modules if is_user_file(getattr(module, "__file__", None) or ""))
    kept = [
        (owner, name, value, copy(value))
        for owner in list_owners(custom)
        for name, value in list_values(owner).items()
        if type(value) in CONTAINERS or isinstance(value, PLAIN | CACHED)
    ]

    def restore() -> None:
        for owner, name, value, before in kept:
            if isinstance(value, CACHED):
                value.cache_clear()
            elif type(value) in CONTAINERS:
                value.clear()
                add: Any = value.extend if isinstance(value, list) else value.update
                add(before)
            elif vars(owner).get(name, value) is not value:
                setattr(owner, name, value)

    return restore


def list_owners(modules: Iterable[ModuleType]) -> Iterator[Any]:
    """Yield modules, and the classes and functions that they define."""
    for module in modules:
        yield module
        for value in list(vars(module).values()):
            is_local = getattr(value, "__module__", None) == module.__name__
            if is_local and isinstance(value, type | FunctionType):
                yield value


def list_values(owner: Any) -> dict[str, Any]:
    """Return the values that a holder, a class, a module or a function has by itself."""
    values = dict(getattr(owner, "__dict__", {}))
    own = dict[str, bool]()
    if isinstance(owner, FunctionType):
        names = owner.__code__.co_varnames[: owner.__code__.co_argcount]
        defaults = reversed(owner.__defaults__ or ())
        values |= dict(zip(reversed(names), defaults, strict=False)) | _list_cells(owner)
    elif not isinstance(owner, type | ModuleType):
        kind: Any = type(owner)
        own = _list_own_names(kind)
    else:
        values = {name: v for name, v in values.items() if not isinstance(v, FunctionType)}
    if isinstance(owner, nn.Module):
        values |= {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
    return {
        name: value
        for name, value in values.items()
        if name not in own and not name.startswith("__") and not isinstance(value, type)
    }


def _list_cells(function: FunctionType) -> dict[str, Any]:
    """Return the variables of a closure."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in pairs if cell != CellType()}


@functools.cache
def _list_own_names(kind: Any) -> dict[str, bool]:
    """Return the names of the attributes that trusted base classes set, and whether they are
    options: set by constructors alone."""
    names = dict.fromkeys(vars(nn.Module()), False) if issubclass(kind, nn.Module) else {}
    for base in kind.__mro__:
        for label, function in () if is_custom(base) else vars(base).items():
            # Few functions set an attribute, and reading instructions takes long.
            if isinstance(function, FunctionType) and STORE in function.__code__.co_code[::2]:
                is_constructor = label in ("__init__", "__setstate__")
                for before, code in pairwise(get_instructions(function)):
                    if code.opname == "STORE_ATTR" and before.argval == "self":
                        names[code.argval] = names.get(code.argval, True) and is_constructor
    return names


def read_key(  # noqa: C901, PLR0912 - one case for each kind
    value: Any, saved: Saved, depth: int = DEPTH, *, is_whole: bool = False
) -> Any:
    """Return the part of a value that is compared; None if there is none."""
    if value is None or depth < 0 or value in saved:
        return None
    if isinstance(value, PLAIN):
        return to_plain_key(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, CACHED):
        # With arguments it may be a cache that grows.
        code = getattr(value.__wrapped__, "__code__", None)
        return value.cache_info().currsize or None if code and not code.co_argcount else None
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        value = value.get_state(legacy=False)
    elif isinstance(value, random.Random):
        return hash(value.getstate())
    elif isinstance(value, nn.Module):
        value = {
            f"{path}.{name}": tensor
            for path, module in value.named_modules()
            for name, tensor in {**module._parameters, **module._buffers}.items()
            if name not in getattr(module, "recomputed", ())
        }
    elif isinstance(value, GeneratorType):
        value = dict(value.gi_frame.f_locals) if value.gi_frame else 0
    elif isinstance(value, Iterator):
        return _read_iterator(value)
    elif isinstance(value, FunctionType):
        value = _list_cells(value)
    elif isinstance(value, set | frozenset):
        value = sorted(map(repr, value))
    elif hasattr(type(value), "state_dict"):
        value = value.state_dict()
    elif is_custom(type(value)) and not isinstance(value, dict | list | tuple | deque):
        value = list_values(value)
    if isinstance(value, Tensor | np.ndarray):
        return _read_array(value, is_whole=is_whole)
    if isinstance(value, dict):
        # A subclass may make its values when they are asked for.
        items = islice(dict.items(value), ENTRIES)
        return {str(n): read_key(v, saved, depth - 1, is_whole=is_whole) for n, v in items}
    if isinstance(value, list | tuple | deque):
        entries = islice(value, ENTRIES)
        keys = [read_key(entry, saved, depth - 1, is_whole=is_whole) for entry in entries]
        return [len(value), *keys]
    return None


def _read_array(value: Any, *, is_whole: bool) -> Any:
    if isinstance(value, Tensor):
        value = local_shard(value)
        if value.is_meta or value.layout != torch.strided:
            return value._version
    step = max(1, len(value.reshape(-1)) // ENTRIES)
    is_sampled = not is_whole and step > WHOLE // ENTRIES
    sample = value.reshape(-1)[:: step if is_sampled else 1]
    version = 0
    if isinstance(value, Tensor):
        version = value._version if is_sampled else 0
        sample = view_bytes(sample).numpy()
    if sample.dtype.hasobject:
        return value.shape
    return str(value.dtype), tuple(value.shape), version, crc32(sample.tobytes())


def _read_iterator(value: Iterator[Any]) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # itertools, from Python 3.12 on
        try:
            return crc32(pickle.dumps(value))
        except Exception as error:  # noqa: BLE001 - it cannot be compared, such as a file
            log.debug("%s cannot be compared: %s", type(value).__name__, error)
            return None


def read_setup(owner: object) -> dict[str, Any]:
    """Return the options of a module or task that classes of torch or phasetrain read, such as the
    probability of a dropout; under an empty name, the number of hooks registered on a module."""
    kind: Any = type(owner)
    options = _list_own_names(kind)
    setup = {
        name: to_plain_key(value)
        for name, value in vars(owner).items()
        if options.get(name) and isinstance(value, PLAIN)
    }
    if isinstance(owner, nn.Module):
        hooks = (owner._forward_hooks, owner._forward_pre_hooks, owner._backward_hooks)
        setup[""] = sum(map(len, hooks))
    return setup
