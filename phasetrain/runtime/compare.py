"""Compares nested states bit for bit, and names the differences."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor


def differences(one: Any, other: Any, path: str = "state") -> list[str]:
    """Return the paths at which two nested states are not equal bit for bit.

    NaN equals NaN with the same bits, 0.0 differs from -0.0, and dtypes, shapes and keys count.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        # A dict, not a set: differences are listed in the order of the keys.
        keys = {**one, **other}
        found = [f"{path}.{key}" for key in keys if key not in one or key not in other]
        for key in one:
            if key in other:
                found += differences(one[key], other[key], f"{path}.{key}")
        return found
    for kind in (list, tuple):
        if isinstance(one, kind) and isinstance(other, kind) and len(one) == len(other):
            pairs = enumerate(zip(one, other, strict=True))
            return [found for i, pair in pairs for found in differences(*pair, f"{path}.{i}")]
    if _comparison_key(one) == _comparison_key(other):
        return []
    return [path]


def digest_leaves(value: Any, path: str) -> dict[str, str]:
    """Return a digest of every tensor, number and string of a nested state, by its path."""
    if isinstance(value, Mapping) and value:
        return {
            below: found
            for key in value
            for below, found in digest_leaves(value[key], f"{path}.{key}").items()
        }
    if isinstance(value, list | tuple) and value:
        pairs = enumerate(value)
        return {
            below: found
            for i, item in pairs
            for below, found in digest_leaves(item, f"{path}.{i}").items()
        }
    return {path: blake2b(repr(_comparison_key(value)).encode(), digest_size=8).hexdigest()}


def _comparison_key(value: Any) -> Any:
    """Return a key that is equal for two values exactly if they are equal bit for bit."""
    if isinstance(value, Tensor):
        # As bytes, since NaN != NaN and 0.0 == -0.0; an empty tensor cannot be viewed as bytes.
        flat = value.detach().cpu().contiguous().view(-1)
        if flat.stride() != (1,):  # a single element counts as contiguous with any stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return str(value.dtype), tuple(value.shape), blake2b(content, digest_size=16).digest()
    if isinstance(value, np.ndarray):
        return (
            str(value.dtype),
            value.shape,
            blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest(),
        )
    # A NumPy scalar and a Python number are the same after a checkpoint.
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):  # hex() keeps the sign of -0.0, and equates NaNs
        return value.hex()
    if isinstance(value, bool):  # True == 1
        return ("bool", value)
    return value
