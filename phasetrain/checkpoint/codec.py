"""Nested state as data: tensors in safetensors, everything else in JSON, and never a pickle."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.checkpoint.snapshot import DTYPES, Snapshot, tensors_in
from phasetrain.distributed.dtensors import local_shard
from phasetrain.errors import InvalidCheckpointError

DEPTH = 64
"""Levels of nesting that are written and read."""

INT_BITS = 8192
"""Longest whole number that is written; Python refuses to read much longer ones from text."""

TENSOR = "$tensor"
TUPLE = "$tuple"
ITEMS = "$items"
FLOAT = "$float"
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(state: Any) -> tuple[bytes, bytes]:
    """Return `state` as (JSON, safetensors).

    None, bool, int, float, str, list, tuple, dict with keys of str, int, bool or None, and dense
    tensors are written exactly, not-a-number and infinities included; a tensor that stands in
    several places is written once. What is derived from a list, tuple or dict, such as Counter,
    comes back as the plain kind.

    Raises:
        TypeError: anything else, with the path to it.
    """
    tree, tensors = taken_apart(state)
    return tree, bytes(Snapshot().take(tensors))


def taken_apart(state: Any) -> tuple[bytes, list[tuple[str, Tensor]]]:
    """Return `state` as (JSON, named tensors); the tensors are those of the state, not copies, and
    may be divided.

    Raises:
        TypeError: see `encode`.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def put(value: Tensor, path: str) -> dict[str, str]:
        _check_tensor(value, path)
        own = local_shard(value)
        same = (
            own.data_ptr(),
            own.dtype,
            tuple(own.shape),
            own.stride(),
            own.is_neg(),
            str(own.device),
        )
        if own.numel() and same in seen:
            return {TENSOR: seen[same]}
        name = path
        while name in tensors:  # the key "a.b" and the keys "a", "b" make the same path
            name += "+"
        seen[same] = name
        tensors[name] = value.detach()
        return {TENSOR: name}

    tree = _encode(state, "", put, 0)
    return json.dumps(tree, allow_nan=False).encode(), list(tensors.items())


def check(state: Any) -> None:
    """See that `encode` could write a state, without copying a tensor.

    Raises:
        TypeError: it could not; the message has the path.
    """

    def look(value: Tensor, path: str) -> dict[str, str]:
        _check_tensor(value, path)
        return {TENSOR: path}

    _encode(state, "", look, 0)


def decode(tree: bytes | bytearray, tensors: bytes | bytearray) -> Any:
    """Return the state that `encode` wrote; its tensors lie in the memory of `tensors` where that
    can be written to.

    Raises:
        InvalidCheckpointError: the bytes are not of that form.
    """
    try:
        return put_together(
            tree, tensors_in(tensors if isinstance(tensors, bytearray) else bytearray(tensors))
        )
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InvalidCheckpointError(
            f"its state cannot be read ({type(error).__name__}: {error})"
        ) from error


def put_together(tree: bytes | bytearray, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `taken_apart` took apart.

    Raises:
        InvalidCheckpointError: the text is not of that form, or names a tensor that is not there.
    """
    try:
        return _decode(json.loads(tree), tensors, 0)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, RuntimeError) as error:
        raise InvalidCheckpointError(
            f"its state cannot be read ({type(error).__name__}: {error})"
        ) from error


def _check_tensor(value: Tensor, path: str) -> None:
    if value.is_meta:
        raise TypeError(f"{path}: a tensor on the device `meta` has no content to save")
    if value.layout != torch.strided:
        raise TypeError(f"{path}: a tensor of layout {value.layout} cannot be saved; make it dense")
    if value.dtype not in DTYPES:
        raise TypeError(
            f"{path}: a tensor of type {value.dtype} cannot be saved; make it of real numbers"
        )


def _encode(value: Any, path: str, put: Any, depth: int) -> Any:
    if depth > DEPTH:
        raise TypeError(f"{path}: state is nested more than {DEPTH} levels deep")
    if isinstance(value, Tensor):
        return put(value, path)
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int and value.bit_length() > INT_BITS:
        raise TypeError(f"{path}: a whole number of more than {INT_BITS} bits cannot be saved")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        return {FLOAT: repr(value)}
    if isinstance(value, list):
        return [_encode(item, _below(path, i), put, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {
            TUPLE: [_encode(item, _below(path, i), put, depth + 1) for i, item in enumerate(value)]
        }
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {
                key: _encode(item, _below(path, key), put, depth + 1) for key, item in value.items()
            }
        if all(key is None or type(key) in (str, int, bool) for key in value):
            return {
                ITEMS: [
                    [key, _encode(item, _below(path, key), put, depth + 1)]
                    for key, item in value.items()
                ]
            }
    raise TypeError(
        f"{path}: {type(value).__module__}.{type(value).__qualname__} cannot be saved in a checkpoint; make it of "
        "tensors, numbers, text, lists, tuples and dicts"
    )


def _below(path: str, key: object) -> str:
    if path:
        return f"{path}.{key}"
    return str(key)


def _decode(value: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > 2 * DEPTH:
        raise ValueError(f"nested more than {DEPTH} levels deep")
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, content)] = value.items()
        if tag == TENSOR:
            return tensors[content]
        if tag == FLOAT:
            return NOT_FINITE[content]
        if tag == TUPLE:
            return tuple(_decode(item, tensors, depth + 1) for item in content)
        if tag == ITEMS:
            return {key: _decode(item, tensors, depth + 1) for key, item in content}
    return {key: _decode(item, tensors, depth + 1) for key, item in value.items()}
