"""The inverse of an order: the positions that contain given samples."""

from typing import Protocol

import numpy as np

from phasetrain.data.samplers.permutation import Indices

BLOCK = 2**18
"""Positions that a search computes together."""


class EpochOrder(Protocol):
    """The indices of one epoch: an int64 array, or an object that computes any slice on access."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, ordinals: slice, /) -> Indices:
        """Return the indices at `[begin:end]`, int64 `(end - begin,)`, always the same ones."""
        ...


def find_positions(found: EpochOrder, indices: Indices) -> Indices:
    """Return all positions of some samples in a pass, ascending, int64.

    A pass that can be inverted takes constant time per sample: its method `find(indices)` returns
    the positions of some samples in any order, int64, and none for samples that do not occur. Any
    other pass is searched: it is computed once, in blocks.
    """
    find = getattr(found, "find", None)
    if find is not None:
        return np.sort(find(indices))
    parts = []
    for begin in range(0, len(found), BLOCK):
        # In blocks, because a pass may be longer than the memory.
        block = found[begin : begin + BLOCK]
        parts.append(begin + np.flatnonzero(np.isin(block, indices)))
    if not parts:
        return np.empty(0, dtype=np.int64)
    return np.concatenate(parts)
