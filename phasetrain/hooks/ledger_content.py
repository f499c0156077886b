"""Selects the entries of batches and weights that the ledger hashes."""

from collections.abc import Sequence
from ctypes import string_at
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

Array = np.ndarray[Any, Any]
Values = TypeVar("Values", Tensor, Array)

SAMPLE_BYTES = 64
"""Bytes of a sample in a tensor that are hashed at most."""

PLAIN_TYPES = frozenset({Tensor, Parameter})
"""Types of tensors without memory of another kind, as subclasses may have."""

MAX_PLACES = 256
"""Places in a tensor that are read at most; each is a cache line that has to be fetched."""

WEIGHT_ENTRIES = 64
"""Entries of a parameter that are hashed at most."""


def to_memory_order(tensor: Tensor) -> Tensor:
    """Return a detached tensor with all dimensions but the first in the order of memory.

    A tensor in `channels_last` can then be read entry by entry without a copy.
    """
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True))


def to_array(tensor: Tensor) -> Array:
    """Return a CPU tensor as an array in memory order."""
    tensor = to_memory_order(tensor)
    try:
        return tensor.numpy()
    except TypeError:  # NumPy has no bfloat16 and float8: hash the same bytes as integers
        integer = torch.int16 if tensor.itemsize == 2 else torch.uint8
        return tensor.contiguous().view(integer).numpy()


# Memory is read with ctypes: making an array of a small tensor takes ten times as long as copying
# its bytes.
def copy_entries(tensor: Tensor, turn: int) -> bytes:
    """Return the entries that `select_entries` selects from a batch on the CPU as bytes."""
    if _is_plain(tensor) and _selects_all(tensor.shape, tensor.itemsize):
        return string_at(tensor.data_ptr(), tensor.nbytes)
    count = len(tensor) if tensor.ndim else 1
    return select_entries(to_array(tensor), count, turn).tobytes()


def copy_weights(parameter: Tensor, turn: int) -> bytes:
    """Return the entries that `select_weights` selects from a parameter on the CPU as bytes."""
    if not _is_plain(parameter):
        return select_weights(to_array(parameter), turn).tobytes()
    count = parameter.numel()
    if count <= WEIGHT_ENTRIES:
        return string_at(parameter.data_ptr(), parameter.nbytes)
    size = parameter.itemsize
    begin = turn * WEIGHT_ENTRIES % (count - WEIGHT_ENTRIES + 1)
    return string_at(parameter.data_ptr() + begin * size, WEIGHT_ENTRIES * size)


def copy_all(tensor: Tensor) -> bytes:
    """Return a tensor on the CPU as bytes in memory order."""
    if _is_plain(tensor):
        return string_at(tensor.data_ptr(), tensor.nbytes)
    return to_array(tensor).tobytes()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the entries of a CPU tensor are in its memory one after the other."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided  # sparse tensors have no is_contiguous
        and tensor.is_contiguous()
    )


def select_entries(values: Values, count: int, turn: int) -> Values:
    """Return about 64 bytes of each sample, or of 256 samples if there are more.

    The bytes are short runs at evenly spaced places: a place costs a cache line, so there are at
    most 256, and the more samples, the fewer and longer the runs of each.

    Args:
        values: the samples, one after the other in memory.
        count: number of samples.
        turn: shifts samples and places, so that over many turns every entry is hashed.

    Returns:
        `(samples, places, entries)`, or `(N, entries)` if that is everything.
    """
    rows = values.reshape(count, -1)
    every, places, run, spacing, spare = _plan_selection(count, rows.shape[1], values.itemsize)
    if every == 1 and run == spacing:
        return rows
    # The digits of `turn` in a mixed radix choose the samples, the shift within a place and the
    # first place, so that all combinations have their turn.
    turn, first = divmod(turn, every)
    turn, shift = divmod(turn, spacing - run + 1)
    begin = turn % spare
    selected = rows[first::every, begin : begin + places * spacing]
    return selected.reshape(len(selected), places, spacing)[:, :, shift : shift + run]


@lru_cache(maxsize=64)
def _selects_all(shape: torch.Size, size: int) -> bool:
    count = shape[0] if shape else 1
    every, _, run, spacing, _ = _plan_selection(count, shape.numel() // count, size)
    return every == 1 and run == spacing


@lru_cache(maxsize=64)
def _plan_selection(count: int, entries: int, size: int) -> tuple[int, int, int, int, int]:
    """Return the distance of selected samples, the places per sample, the entries per place, the
    distance of places, and the number of offsets of the first place."""
    every = -(-count // MAX_PLACES)
    wanted = max(1, min(entries, SAMPLE_BYTES // size))
    places = max(1, min(wanted, MAX_PLACES * every // count))
    if wanted == entries:
        return every, 1, entries, entries, 1
    run = wanted // places
    spacing = entries // places
    return every, places, run, spacing, entries - places * spacing + 1


def select_weights(values: Values, turn: int) -> Values:
    """Return up to 64 adjacent entries of a parameter; over many turns every entry is hashed."""
    flat = values.reshape(-1)
    return flat[turn * WEIGHT_ENTRIES % max(1, len(flat) - WEIGHT_ENTRIES + 1) :][:WEIGHT_ENTRIES]


def hash_bytes(data: bytes) -> int:
    """Return the 64-bit BLAKE2b hash of `data`."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def finish_hash(hasher: blake2b) -> int:
    """Return the hash of everything that `hasher` got, as a 64-bit integer."""
    return int.from_bytes(hasher.digest(), "little")


def copy_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of 0-d tensors, with one copy per device and type."""
    values = [0.0] * len(scalars)
    for places in _group_by_kind(scalars):
        stacked = torch.stack([scalars[index] for index in places])
        for index, value in zip(places, stacked.cpu().tolist(), strict=True):
            values[index] = value
    return values


def copy_bytes(blocks: Sequence[Tensor]) -> list[bytes]:
    """Return the bytes of tensors, with one copy per device and type."""
    contents = [b""] * len(blocks)
    for places in _group_by_kind(blocks):
        joined = torch.cat([blocks[index].reshape(-1) for index in places]).cpu()
        sizes = [blocks[index].numel() for index in places]
        for index, part in zip(places, torch.split(joined, sizes), strict=True):
            contents[index] = to_array(part).tobytes()
    return contents


def _group_by_kind(values: Sequence[Tensor]) -> list[list[int]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        kinds.setdefault((value.device, value.dtype), []).append(index)
    return list(kinds.values())
