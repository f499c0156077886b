"""Digests of tensors and of nested states, which are equal exactly if all bits are."""

from collections.abc import Callable, Mapping
from hashlib import blake2b, sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.distributed.dtensors import local_shard

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes per element: bits are compared as integers, in which NaN equals NaN."""


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor in row-major order as bytes on the CPU, uint8 `(N,)`.

    Without a copy if it is contiguous and on the CPU.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():  # has no bytes to view
        return torch.empty(0, dtype=torch.uint8)
    if flat.stride() != (1,):  # a single element counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    # As bytes: NumPy has no bfloat16 and float8, NaN != NaN and 0.0 == -0.0.
    return flat.view(torch.uint8)


def view_integers(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor in row-major order as integers with the same bits, `(N,)`, on
    its device; a complex number is two entries."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.itemsize])


def sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the entries as integers modulo 2^64, 0-d; any single flipped bit changes
    it. A digest that does not wait for the device."""
    return view_integers(tensor).sum(dtype=torch.int64)


def add_tensor(update: Callable[[Any], None], tensor: Tensor, name: str | None = None) -> None:
    """Add a tensor to a hash: `NAME TYPE SHAPE;`, or `TYPE SHAPE;` without a name, then its bytes.

    Checkpoints, ledgers, status.json and fingerprints of data contain digests of these bytes.

    Args:
        update: adds bytes to the hash.
        tensor: the tensor.
        name: its name in a state.
    """
    label = "" if name is None else f"{name} "
    update(f"{label}{tensor.dtype} {tuple(tensor.shape)};".encode())
    update(view_bytes(tensor).numpy().data)


def hash_tensors(*tensors: Tensor) -> str:
    """Return the SHA-256 over type, shape and bytes of tensors."""
    digest = sha256()
    for tensor in tensors:
        add_tensor(digest.update, tensor)
    return digest.hexdigest()


def digest_leaves(value: Any, path: str) -> dict[str, str]:
    """Return a digest of every tensor, number and string of a nested state, by its path."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value)) or value
    if not isinstance(value, Mapping) or not value:
        return {path: _digest_leaf(value)}
    digests: dict[str, str] = {}
    for key, item in value.items():
        digests |= digest_leaves(item, f"{path}.{key}")
    return digests


def to_plain_key(value: Any) -> Any:
    """Return a key of a value that is no tensor or array, equal exactly for the same bits."""
    # A NumPy scalar and a Python number are the same after a checkpoint.
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):  # hex() keeps the sign of -0.0, and equates NaNs
        return ("float", value.hex())
    if isinstance(value, bool):  # True == 1
        return ("bool", value)
    return value


def _digest_leaf(value: Any) -> str:
    digest = blake2b(digest_size=8)
    if isinstance(value, Tensor):
        # Of a tensor that several ranks share, each rank compares its own shard.
        add_tensor(digest.update, local_shard(value))
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape};".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    else:
        digest.update(repr(to_plain_key(value)).encode())
    return digest.hexdigest()
