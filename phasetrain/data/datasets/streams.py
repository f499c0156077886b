"""Sources that can only be read forward, as a dataset with indices."""

import logging
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from phasetrain.data.datasets.base import locate_part
from phasetrain.runtime.format import join_first

log = logging.getLogger(__name__)


class Stream(Protocol):
    """Samples in shards (files, members of archives, ...) that are read forward from a position."""

    def shard_lengths(self) -> Sequence[int]:
        """Return the number of samples of each shard, always the same."""
        ...

    def read(self, shard: int, start: int) -> Iterator[Any]:
        """Yield the samples of a shard from the `start`-th on, counted from 0; several may be open
        at once."""
        ...


class StreamDataset(Dataset[Any]):
    """A stream as a dataset; indices run through the shards.

    Readers stay open at the position they have reached. The index after a read one continues with
    its reader; an index slightly ahead moves the nearest reader forward; any other opens a shard.
    Every process has its own readers.

    Args:
        stream: the samples.
        skip: maximum number of samples that a reader skips before its shard is opened at the
            position instead.
        readers: maximum number of open readers; beyond it the least recently used one is closed. It
            must be at least the number of lanes of a process.

    Attributes:
        shard_lengths: number of samples of each shard.

    Raises:
        ValueError: a shard of negative length, or no samples at all; on access, a shard that ends
            early.
        IndexError: on access, an index outside the dataset.

    Example:
        >>> samples = StreamDataset(stream)
        >>> samples[0], samples[1]  # one reader
    """

    def __init__(self, stream: Stream, *, skip: int = 1000, readers: int = 256) -> None:
        self.stream = stream
        self.shard_lengths = tuple(int(length) for length in stream.shard_lengths())
        if any(length < 0 for length in self.shard_lengths) or not sum(self.shard_lengths):
            raise ValueError(
                f"shards of {join_first(self.shard_lengths, 6, empty='no')} samples: expected "
                "nonnegative lengths with a positive sum"
            )
        self._begins = np.cumsum([0, *self.shard_lengths])
        self._skip = skip
        self._most = readers
        self._process = os.getpid()
        # Next index -> reader, and the index at which its shard ends; most recently used last.
        self._readers: dict[int, tuple[Iterator[Any], int]] = {}

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        # A fork inherits readers whose file positions are shared with the parent.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._readers = {}
        if index in self._readers:
            reader, end = self._readers.pop(index)
        else:
            reader, end = self._open_reader(index)
        try:
            sample = next(reader)
        except StopIteration:
            shard, at = locate_part(self._begins, index)
            raise ValueError(
                f"shard {shard} ends before its sample {at}, and its length is "
                f"{self.shard_lengths[shard]}"
            ) from None
        if index + 1 < end:
            self._readers[index + 1] = reader, end
            if len(self._readers) > self._most:
                # A reader is inserted again at each use, so the first entry is the least recently
                # used one.
                del self._readers[next(iter(self._readers))]
        return sample

    def __getstate__(self) -> dict[str, Any]:
        # Readers are generators, which cannot be pickled for spawned workers.
        return vars(self) | {"_readers": {}}

    def fingerprint(self) -> str:
        """Return the SHA-256 over the lengths of the shards; subclasses that know more override
        it."""
        return sha256(str(self.shard_lengths).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return nothing; subclasses that know facts override it."""
        return {}

    def _open_reader(self, index: int) -> tuple[Iterator[Any], int]:
        shard, at = locate_part(self._begins, index)
        begin = index - min(at, self._skip)
        near = max(
            (position for position in self._readers if begin <= position < index), default=None
        )
        if near is not None:
            reader, end = self._readers.pop(near)
            try:
                for _ in range(index - near):
                    next(reader)
            except Exception as error:  # an error of a skipped sample is not the caller's business
                log.debug(
                    "shard %d, on the way to sample %d: opened there instead",
                    shard,
                    at,
                    exc_info=error,
                )
            else:
                return reader, end
        return self.stream.read(shard, at), int(self._begins[shard + 1])
