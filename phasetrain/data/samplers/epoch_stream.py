"""An endless stream of shuffled epochs."""

import numpy as np
from numpy.typing import NDArray

from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.permutation import KEPT, Indices, Permutation
from phasetrain.data.samplers.phase_sampler import LARGEST_TABLE
from phasetrain.data.transforms.base import GOLDEN, Keys, mix64
from phasetrain.runtime.machine import seed_of

TABLE = 512
"""Minimum number of draws computed together: NumPy's call overhead dominates for small sources."""


class EpochStream:
    """The numbers from 0 to `length - 1` in an endless stream, shuffled independently in each
    epoch.

    An epoch sorts the numbers by a hash of seed, epoch and number; above 2**20 numbers it is a
    `Permutation`. Any position is computed without the positions before it.

    Args:
        length: how many numbers, at least 1.
        seed: seed of the order.

    Example:
        >>> draws = EpochStream(4, seed=0)
        >>> sorted(draws[4:8].tolist())
        [0, 1, 2, 3]
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed
        self._group = 1 if length > TABLE else -(-TABLE // length)
        self._tables: dict[int, EpochOrder] = {}

    def __getitem__(self, draws: slice) -> Indices:
        """Return the numbers of the draws from `start` to `stop`, int64 `(stop - start,)`."""
        begin = draws.start
        end = draws.stop
        size = self._length * self._group
        parts = []
        while begin < end:
            number, offset = divmod(begin, size)
            parts.append(self._get_table(number)[offset : offset + end - begin])
            begin += len(parts[-1])
        if parts:
            return np.concatenate(parts)
        return np.empty(0, dtype=np.int64)

    def _get_table(self, number: int) -> EpochOrder:
        if number not in self._tables:
            if len(self._tables) == KEPT:
                # Streams are read forward, so the oldest table is not needed any more.
                del self._tables[next(iter(self._tables))]
            self._tables[number] = self._make_table(number)
        return self._tables[number]

    def _make_table(self, number: int) -> EpochOrder:
        if self._length > LARGEST_TABLE:
            return Permutation(self._length, seed_of(self._seed, "pass", number))
        # Arrays of uint64 wrap around modulo 2**64, as the hash requires; NumPy scalars would warn.
        passes = np.arange(number * self._group, (number + 1) * self._group, dtype=np.uint64)
        words = mix64(
            mix64(passes ^ np.uint64(self._seed))[:, None]
            + np.arange(self._length, dtype=np.uint64) * GOLDEN
        )
        # Stable, so that equal hashes give the same order with every version of NumPy.
        return np.argsort(words, axis=1, kind="stable").astype(np.int64, copy=False).reshape(-1)


def draw_uniform(seed: int, begin: int, end: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each ordinal of `[begin, end)`, a function of seed and ordinal,
    float64."""
    # Without state: any part of an epoch can be drawn without the draws before it.
    return Keys(mix64(np.arange(begin, end, dtype=np.uint64) ^ np.uint64(seed))).uniform()
