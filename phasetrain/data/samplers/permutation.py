"""Passes that are computed on access, and permutations of any length as such."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from phasetrain.data.transforms.base import mix64
from phasetrain.runtime.machine import seed_of

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 8
CHUNK = 16_384
"""Ordinals that are computed together: NumPy's call overhead dominates for a few."""
KEPT = 2
"""Cached chunks: one for the reader that runs ahead, one for the loop behind it."""


class Identity:
    """The numbers from 0 to `length - 1` in order, computed on access.

    Example:
        >>> Identity(10**9)[5:8]
        array([5, 6, 7])
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def find(self, numbers: Indices) -> Indices:
        """Return the positions of some numbers, int64; others than these numbers have none."""
        return numbers[(numbers >= 0) & (numbers < self._length)]

    def __getitem__(self, places: slice) -> Indices:
        """Return the numbers at some positions, int64 `(N,)`."""
        return np.arange(*places.indices(self._length), dtype=np.int64)


class _Chunked(ABC):
    """Numbers that are computed in chunks on access; the latest chunks are cached."""

    def __init__(self, length: int, chunk: int = CHUNK) -> None:
        self._length = length
        self._chunk = chunk
        self._chunks: dict[int, Indices] = {}

    @abstractmethod
    def _compute(self, begin: int, end: int) -> Indices: ...

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, ordinals: slice) -> Indices:
        """Return the indices at some ordinals, int64 `(N,)`."""
        begin, end, step = ordinals.indices(self._length)
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        # Chunks begin at multiples of their size, so that any two slices share them.
        starts = range(begin - begin % self._chunk, end, self._chunk)
        parts = [self._get_chunk(start)[max(begin - start, 0) : end - start] for start in starts]
        return np.concatenate(parts)[::step]

    def _get_chunk(self, start: int) -> Indices:
        if start not in self._chunks:
            # A dict keeps the order of insertion, so this drops the chunk that was computed first.
            if len(self._chunks) == KEPT:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[start] = self._compute(start, min(start + self._chunk, self._length))
        return self._chunks[start]


class ChunkedPass(_Chunked):
    """A pass that is computed in chunks on access; the latest chunks are cached.

    Args:
        length: number of samples of the pass.
        compute: returns the indices at `[begin, end)`, int64, a pure function.
        chunk: number of samples per chunk.

    Example:
        >>> ChunkedPass(10**12, lambda begin, end: np.arange(begin, end) // 2)[6:9]
        array([3, 3, 4])
    """

    def __init__(
        self, length: int, compute: Callable[[int, int], Indices], chunk: int = CHUNK
    ) -> None:
        super().__init__(length, chunk)
        self._function = compute

    def _compute(self, begin: int, end: int) -> Indices:
        return self._function(begin, end)


class Permutation(_Chunked):
    """A pseudorandom permutation of the numbers from 0 to `length - 1`, each a function of its
    position alone.

    A Feistel network needs no table: memory and start-up do not grow with the dataset, and resuming
    in the middle of an epoch of 10**12 samples costs nothing. A balanced network (Luby and Rackoff
    1988, doi:10.1137/0217022) permutes the smallest range with an even number of bits that contains
    all numbers; a result outside the numbers is permuted again until it is inside ("cycle walking":
    Black and Rogaway 2002, Ciphers with arbitrary finite domains, doi:10.1007/3-540-45760-7_9), at
    most four times on average. The round function is the upper half of SplitMix64's finaliser of
    the right half and a round key; round keys are hashes of the seed. It shuffles, it is not a
    cipher, and it is meant for many numbers: a narrow network does not reach every order.

    Args:
        length: how many numbers, up to 2**62.
        seed: seed of the order.
        rounds: rounds of the network.

    Example:
        >>> Permutation(10**9, seed=0)[500_000_000:500_000_003]
        array([465235100, 685662030, 172162241])
    """

    def __init__(self, length: int, seed: int, *, rounds: int = ROUNDS) -> None:
        if not 0 <= length <= 2**62:
            raise ValueError(f"length = {length}: expected 0 to 2**62 numbers")
        # bit_length of a Python integer is exact, log2 of a float is not near powers of two. With
        # an even number of bits the range is less than four times the length, so few results are
        # outside.
        half = max(1, ((length - 1).bit_length() + 1) // 2)
        # Integers only, so that the order is the same on every machine and version of NumPy.
        super().__init__(length)
        self._half = np.uint64(half)
        self._mask = np.uint64(2**half - 1)
        self._shift = np.uint64(64 - half)
        self._round_keys = [np.uint64(seed_of(seed, "feistel", number)) for number in range(rounds)]

    def __getitem__(self, places: slice) -> Indices:
        """Return the numbers at some positions, int64 `(N,)`, as a new array."""
        begin, end, step = places.indices(self._length)
        if step != 1:
            return self.at(np.arange(begin, end, step, dtype=np.int64))
        return super().__getitem__(places)

    def at(self, places: Indices) -> Indices:
        """Return the number at each of some positions.

        Args:
            places: int64 `(N,)`, each in [0, length).
        """
        return self._walk(places, self._encrypt)

    def find(self, numbers: Indices) -> Indices:
        """Return the position of each of some numbers, int64; numbers outside of `[0, length)` have
        none.

        It runs the network backwards, in constant time per number.
        """
        return self._walk(Identity(self._length).find(numbers), self._decrypt)

    def _walk(self, words: Indices, permute: Callable[[Words], Words]) -> Indices:
        """Return the words after a permutation of the range of the network, each repeated until it
        is below the length."""
        permuted = permute(words.astype(np.uint64))
        # Ends: repeated application follows a cycle that contains the start, which is inside.
        outside = np.flatnonzero(permuted >= self._length)
        while len(outside):
            again = permute(permuted[outside])
            permuted[outside] = again
            outside = outside[again >= self._length]
        return permuted.astype(np.int64)

    def _compute(self, begin: int, end: int) -> Indices:
        return self.at(np.arange(begin, end, dtype=np.int64))

    def _decrypt(self, words: Words) -> Words:
        left = words >> self._half
        right = words & self._mask
        for key in reversed(self._round_keys):
            # The round of `_encrypt` backwards: its right half became the left one.
            left, right = right ^ (mix64(left ^ key) >> self._shift), left
        return left << self._half | right

    def _encrypt(self, words: Words) -> Words:
        left = words >> self._half
        right = words & self._mask
        for key in self._round_keys:
            # One round: invertible whatever the round function, which makes this a permutation.
            left, right = right, left ^ (mix64(right ^ key) >> self._shift)
        return left << self._half | right
