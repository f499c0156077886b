"""Comparing nested states bit for bit, and naming what differs."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor


def differences(one: Any, other: Any, path: str = "state") -> list[str]:
    """Return the paths at which two nested states are not equal bit for bit.

    NaN equals NaN of the same bits, 0.0 does not equal -0.0, and types, shapes and keys count.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        lacking = [
            f"{path}.{key}" for key in {**one, **other} if key not in one or key not in other
        ]
        both = [key for key in one if key in other]
        return lacking + [
            found for key in both for found in differences(one[key], other[key], f"{path}.{key}")
        ]
    for kind in (list, tuple):
        if isinstance(one, kind) and isinstance(other, kind) and len(one) == len(other):
            pairs = enumerate(zip(one, other, strict=True))
            return [found for i, pair in pairs for found in differences(*pair, f"{path}.{i}")]
    if _bits(one) == _bits(other):
        return []
    return [path]


def digests(value: Any, path: str) -> dict[str, str]:
    """Return a digest of every tensor, number and word of a nested state, by its path."""
    if isinstance(value, Mapping) and value:
        return {
            below: found
            for key in value
            for below, found in digests(value[key], f"{path}.{key}").items()
        }
    if isinstance(value, list | tuple) and value:
        pairs = enumerate(value)
        return {
            below: found
            for i, item in pairs
            for below, found in digests(item, f"{path}.{i}").items()
        }
    return {path: blake2b(repr(_bits(value)).encode(), digest_size=8).hexdigest()}


def _bits(value: Any) -> Any:
    """Return what is equal for two values exactly when they are equal bit for bit."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return str(value.dtype), tuple(value.shape), blake2b(content, digest_size=16).digest()
    if isinstance(value, np.ndarray):
        return (
            str(value.dtype),
            value.shape,
            blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest(),
        )
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bool):
        return ("bool", value)
    return value
