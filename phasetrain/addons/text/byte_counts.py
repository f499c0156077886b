"""The number of bytes of text behind each token of a vocabulary."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import overload

import numpy as np
from numpy.typing import NDArray


class ByteCounts(Sequence[int]):
    """Bytes of UTF-8 text that each token represents; 0 for the end of a document.

    Args:
        counts: bytes per token, `(vocabulary,)`.
    """

    def __init__(self, counts: NDArray[np.uint16]) -> None:
        self.counts = np.ascontiguousarray(counts, dtype="<u2")

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, token: int) -> int: ...

    @overload
    def __getitem__(self, token: slice) -> list[int]: ...

    def __getitem__(self, token: int | slice) -> int | list[int]:
        if isinstance(token, slice):
            values: list[int] = self.counts[token].tolist()
            return values
        return int(self.counts[token])

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteCounts) and bool(np.array_equal(self.counts, other.counts))

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        # plan.json stores facts as text: a digest instead of thousands of numbers.
        return f"bytes of {len(self)} tokens ({self.digest[:12]})"

    __repr__ = __str__

    @property
    def digest(self) -> str:
        """SHA-256 of the counts."""
        return sha256(self.counts.tobytes()).hexdigest()
