"""Sources that can only be read forward, as a dataset with indices."""

import logging
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from phasetrain.runtime.format import join_first

log = logging.getLogger(__name__)


class Stream(Protocol):
    """Samples in shards (files, members of archives, ...) that are read from a place on, one after
    the other."""

    def shard_lengths(self) -> Sequence[int]:
        """Return the number of samples of each shard, always the same."""
        ...

    def read(self, shard: int, start: int) -> Iterator[Any]:
        """Yield the samples of a shard from the `start`-th on, which is counted from 0; several may
        be open at once."""
        ...


class StreamDataset(Dataset[Any]):
    """A stream as a data set: the sample of an index, which counts through the shards.

    Readers stay open at the place that they have reached. An index that follows one that was read
    goes on with its reader; one that lies a little ahead moves the nearest reader forward; any
    other opens a shard. Every process has readers of its own.

    Args:
        stream: the samples.
        skip: samples that a reader passes over before its shard is opened at the place instead.
        readers: readers that stay open; more of them close the one that was used longest ago. The
            lanes of a process have to find room.

    Attributes:
        shard_lengths: samples of each shard.

    Raises:
        ValueError: a shard of negative length, or no samples at all; on access, a shard that ends
            too early.
        IndexError: on access, an index outside of the data set.

    Example:
        >>> samples = StreamDataset(stream)
        >>> samples[0], samples[1]  # one reader
    """

    def __init__(self, stream: Stream, *, skip: int = 1000, readers: int = 256) -> None:
        self.stream = stream
        self.shard_lengths = tuple(int(length) for length in stream.shard_lengths())
        if any(length < 0 for length in self.shard_lengths) or not sum(self.shard_lengths):
            raise ValueError(
                f"shards of {join_first(self.shard_lengths, 6, empty='no')} samples: "
                "expected some, and none below 0"
            )
        self._ends = np.cumsum(np.array(self.shard_lengths, dtype=np.int64))
        self._skip = skip
        self._most = readers
        self._process = os.getpid()
        # Index that comes next -> reader, and the index at which its shard ends; the latest used
        # stands at the end.
        self._readers: dict[int, tuple[Iterator[Any], int]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        if (
            self._process != os.getpid()
        ):  # a fork has inherited readers, and the places of files with them
            self._process = os.getpid()
            self._readers = {}
        reader, end = self._readers.pop(index) if index in self._readers else self._reader_at(index)
        try:
            sample = next(reader)
        except StopIteration:
            shard, at = self._place(index)
            raise ValueError(
                f"shard {shard} ends before its sample {at}, and {self.shard_lengths[shard]} samples were told of it"
            ) from None
        if index + 1 < end:
            self._readers[index + 1] = reader, end
            if len(self._readers) > self._most:
                del self._readers[next(iter(self._readers))]
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_readers": {}}

    def fingerprint(self) -> str:
        """Return the SHA-256 over the lengths of the shards; a stream that knows more has one of
        its own."""
        return sha256(str(self.shard_lengths).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return nothing; a stream that knows more has facts of its own."""
        return {}

    def _place(self, index: int) -> tuple[int, int]:
        """Return the shard of an index, and the number of the sample there."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard]) + self.shard_lengths[shard]

    def _reader_at(self, index: int) -> tuple[Iterator[Any], int]:
        shard, at = self._place(index)
        begin = index - min(at, self._skip)
        near = max((place for place in self._readers if begin <= place < index), default=None)
        if near is not None:
            reader, end = self._readers.pop(near)
            try:
                for _ in range(index - near):
                    next(reader)
            except Exception as error:  # of a sample that nobody has asked for
                log.debug(
                    "shard %d, on the way to sample %d: opened there instead",
                    shard,
                    at,
                    exc_info=error,
                )
            else:
                return reader, end
        return self.stream.read(shard, at), int(self._ends[shard])
