"""Shuffled passes without an end, and passes that are computed where they are asked for."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from phasetrain.data.samplers.permutation import CHUNK, KEPT, Indices, Permutation
from phasetrain.data.samplers.phase_sampler import LARGEST_TABLE, Pass
from phasetrain.data.transforms.base import GOLDEN, Keys, mix64
from phasetrain.runtime.machine import seed_of

TABLE = 512
"""Draws that are made together of a source that is smaller."""


class Computed:
    """A pass that is made piece by piece where it is asked for; the latest pieces are kept.

    Args:
        length: samples of the pass.
        compute: returns the indices at `[begin, end)`, int64, always the same ones.

    Example:
        >>> Computed(10**12, lambda begin, end: np.arange(begin, end) // 2)[6:9]
        array([3, 3, 4])
    """

    def __init__(self, length: int, compute: Callable[[int, int], Indices]) -> None:
        self._length = length
        self._compute = compute
        self._chunks: dict[int, Indices] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, ordinals: slice) -> Indices:
        """Return the indices at some ordinals, int64 `(N,)`."""
        begin, end, step = ordinals.indices(self._length)
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        starts = range(begin - begin % CHUNK, end, CHUNK)
        parts = [self._chunk(start)[max(begin - start, 0) : end - start] for start in starts]
        return np.concatenate(parts)[::step]

    def _chunk(self, start: int) -> Indices:
        if start not in self._chunks:
            if len(self._chunks) == KEPT:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[start] = self._compute(start, min(start + CHUNK, self._length))
        return self._chunks[start]


class Passes:
    """The numbers from 0 to `length - 1`, shuffled pass after shuffled pass, without an end.

    The order of a pass sorts the numbers by a hash of seed, pass and number; that of more than
    2**20 numbers is a `Permutation`. So any place is reached without those before it.

    Args:
        length: how many numbers, at least 1.
        seed: what the order is a function of.

    Example:
        >>> draws = Passes(4, seed=0)
        >>> sorted(draws[4:8].tolist())
        [0, 1, 2, 3]
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed
        self._group = 1 if length > TABLE else -(-TABLE // length)
        self._tables: dict[int, Pass] = {}

    def __getitem__(self, draws: slice) -> Indices:
        """Return the numbers of the draws from `start` to `stop`, int64 `(stop - start,)`."""
        begin = draws.start
        end = draws.stop
        size = self._length * self._group
        parts = []
        while begin < end:
            number, place = divmod(begin, size)
            parts.append(self._table(number)[place : place + end - begin])
            begin += len(parts[-1])
        if parts:
            return np.concatenate(parts)
        return np.empty(0, dtype=np.int64)

    def _table(self, number: int) -> Pass:
        if number not in self._tables:
            if len(self._tables) == KEPT:
                del self._tables[next(iter(self._tables))]
            self._tables[number] = self._made(number)
        return self._tables[number]

    def _made(self, number: int) -> Pass:
        if self._length > LARGEST_TABLE:
            return Permutation(self._length, seed_of(self._seed, "pass", number))
        passes = np.arange(number * self._group, (number + 1) * self._group, dtype=np.uint64)
        words = mix64(
            mix64(passes ^ np.uint64(self._seed))[:, None]
            + np.arange(self._length, dtype=np.uint64) * GOLDEN
        )
        return np.argsort(words, axis=1, kind="stable").astype(np.int64, copy=False).reshape(-1)


def uniform(seed: int, begin: int, end: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each ordinal of `[begin, end)`, a function of it and the seed,
    float64."""
    return Keys(mix64(np.arange(begin, end, dtype=np.uint64) ^ np.uint64(seed))).uniform()


def at_least(name: str, value: int | None, least: int = 1) -> None:
    """Refuse a number that is too small.

    Raises:
        ValueError: it is below `least`.
    """
    if value is not None and value < least:
        raise ValueError(f"{name} = {value}: expected at least {least}")
