"""Nested state as data: tensors as safetensors, everything else as JSON.

Not a pickle: loading one runs the code it names, it can only be read if that code still exists, and
a damaged one is not detected.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.checkpoint.snapshot import DTYPES, Snapshot, parse_safetensors
from phasetrain.distributed.dtensors import local_shard
from phasetrain.errors import InvalidCheckpointError

DEPTH = 64
"""Maximum depth of nesting, well below Python's recursion limit."""

INT_BITS = 8192
"""Maximum size of an integer; Python rejects much longer ones in text (int_max_str_digits)."""

TENSOR = "$tensor"
TUPLE = "$tuple"
ITEMS = "$items"
FLOAT = "$float"
COMPLEX = "$complex"
# RuntimeError includes RecursionError, which deeply nested JSON raises.
PARSING_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RuntimeError,
)
"""Exceptions raised while malformed data is parsed."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(state: Any) -> tuple[bytes, bytes]:
    """Return `state` as (JSON, safetensors).

    None, bool, int, float, str, list, tuple, dict with keys of str, int, bool or None, and dense
    tensors are written exactly, including NaN and infinities; a tensor referenced several times is
    written once. Subclasses of list, tuple and dict, such as Counter, are read back as the base
    class.

    Raises:
        TypeError: a value of another type, with its path.
    """
    tree, tensors = flatten_state(state)
    return tree, bytes(Snapshot().copy_tensors(tensors))


def flatten_state(state: Any) -> tuple[bytes, list[tuple[str, Tensor]]]:
    """Return `state` as (JSON, named tensors).

    The tensors are not copied, and may be DTensors.

    Raises:
        TypeError: see `encode`.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def add_tensor(value: Tensor, path: str) -> dict[str, str]:
        local = local_shard(value)
        # Equal only if every byte read is the same: two views of one storage may differ in shape,
        # stride or a lazy bit. Empty tensors all have data_ptr 0.
        identity = (
            local.data_ptr(),
            local.dtype,
            tuple(local.shape),
            local.stride(),
            local.is_neg(),
            local.is_conj(),
            str(local.device),
        )
        if local.numel() and identity in seen:
            return {TENSOR: seen[identity]}
        name = path
        while name in tensors:  # the key "a.b" and the keys "a", "b" make the same path
            name += "+"
        seen[identity] = name
        tensors[name] = value.detach()
        return {TENSOR: name}

    # allow_nan=False below is a safeguard: a bare NaN would be invalid JSON.
    tree = _encode(state, "", add_tensor, 0)
    return json.dumps(tree, allow_nan=False).encode(), list(tensors.items())


def check_encodable(state: Any) -> None:
    """Check that `encode` can write a state, without copying a tensor.

    Raises:
        TypeError: it cannot; the message contains the path.
    """

    _encode(state, "", lambda value, path: None, 0)


def decode(tree: bytes | bytearray, tensors: bytes | bytearray) -> Any:
    """Return the state that `encode` wrote; its tensors share memory with a bytearray `tensors`.

    Raises:
        InvalidCheckpointError: the bytes are not of that form.
    """
    # Tensors must be writable, so bytes are copied.
    data = tensors if isinstance(tensors, bytearray) else bytearray(tensors)
    with reject_malformed("its state"):
        return assemble_state(tree, parse_safetensors(data))


def assemble_state(tree: bytes | bytearray, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `flatten_state` has split.

    Raises:
        InvalidCheckpointError: the text is not of that form, or names a missing tensor.
    """
    with reject_malformed("its state"):
        return _decode(json.loads(tree), tensors, 0)


@contextmanager
def reject_malformed(name: str) -> Iterator[None]:
    """Turn the errors of parsing malformed data into an InvalidCheckpointError.

    Args:
        name: the data, for the message.
    """
    try:
        yield
    except PARSING_ERRORS as error:
        raise InvalidCheckpointError(
            f"{name} cannot be read ({type(error).__name__}: {error})"
        ) from error


def _encode_tensor(value: Tensor, path: str, add_tensor: Any) -> Any:
    if value.is_meta:
        raise TypeError(f"{path}: a tensor on the device `meta` has no content to save")
    if value.layout != torch.strided:
        raise TypeError(f"{path}: a tensor of layout {value.layout} cannot be saved; make it dense")
    if value.dtype not in DTYPES and value.dtype != torch.complex128:
        raise TypeError(
            f"{path}: a tensor of type {value.dtype} cannot be saved; convert it to another type"
        )
    if value.dtype == torch.complex128:  # the format has no such type
        return {COMPLEX: add_tensor(torch.view_as_real(value.detach().resolve_conj()), path)}
    return add_tensor(value, path)


def _encode(value: Any, path: str, add_tensor: Any, depth: int) -> Any:
    def encode_item(key: object, item: Any) -> Any:
        item_path = str(key)
        if path:
            item_path = f"{path}.{key}"
        return _encode(item, item_path, add_tensor, depth + 1)

    if depth > DEPTH:
        raise TypeError(f"{path}: state is nested more than {DEPTH} levels deep")
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, add_tensor)
    if isinstance(value, np.generic):  # NumPy scalars come from metrics and samplers
        value = value.item()
    if type(value) is int and value.bit_length() > INT_BITS:
        raise TypeError(f"{path}: a whole number of more than {INT_BITS} bits cannot be saved")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:  # JSON has no NaN and no infinity
        if math.isfinite(value):
            return value
        return {FLOAT: repr(value)}
    if isinstance(value, list):
        return [encode_item(i, item) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TUPLE: [encode_item(i, item) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode_item(key, item) for key, item in value.items()}
        # JSON turns every key into text: other keys, and keys that look like a tag, go into pairs.
        if all(key is None or type(key) in (str, int, bool) for key in value):
            return {ITEMS: [[key, encode_item(key, item)] for key, item in value.items()]}
    raise TypeError(
        f"{path}: {type(value).__module__}.{type(value).__qualname__} cannot be saved in a "
        "checkpoint; make it of tensors, numbers, text, lists, tuples and dicts"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > 2 * DEPTH:  # a tag takes a level of its own
        raise ValueError(f"nested more than {DEPTH} levels deep")
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, content)] = value.items()
        if tag == TENSOR:
            return tensors[content]
        if tag == COMPLEX:
            return torch.view_as_complex(_decode(content, tensors, depth + 1))
        if tag == FLOAT:
            return NOT_FINITE[content]
        if tag == TUPLE:
            return tuple(_decode(item, tensors, depth + 1) for item in content)
        if tag == ITEMS:
            return {key: _decode(item, tensors, depth + 1) for key, item in content}
    return {key: _decode(item, tensors, depth + 1) for key, item in value.items()}
