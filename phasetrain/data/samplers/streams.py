"""Sources that can only be read forward: as a data set with indices, and an order in which indices
go forward."""

import logging
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Order, Pass

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


@runtime_checkable
class Sharded(Protocol):
    """A data set whose indices count through shards, one shard after the other."""

    shard_lengths: tuple[int, ...]


class Streamed(Dataset[Any]):
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
        >>> samples = Streamed(stream)
        >>> samples[0], samples[1]  # one reader
    """

    def __init__(self, stream: Stream, *, skip: int = 1000, readers: int = 256) -> None:
        self.stream = stream
        self.shard_lengths = tuple(int(length) for length in stream.shard_lengths())
        if any(length < 0 for length in self.shard_lengths) or not sum(self.shard_lengths):
            raise ValueError(
                f"shards of {_few(self.shard_lengths)} samples: expected some, and none below 0"
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


@SAMPLERS.register("lanes")
def lanes(
    batch_size: int,
    shard_lengths: Sequence[int] | None = None,
    *,
    lanes: int = 8,
    shuffle: bool = True,
) -> Order:
    """Return the order in which every process reads shards forward, each in its own part of a pass.

    See `Lanes`.

    Args:
        batch_size: fact; samples per update or test step, over all processes.
        shard_lengths: fact; samples of each shard.
        lanes: places at which a pass is read at once; numbers of processes that divide it share no
            shard but at the borders of their parts.
        shuffle: every pass has the shards in an order of its own; within a shard samples keep
            theirs.

    Raises:
        ValueError: a data set without shards, or lanes that do not divide the batch.
    """
    if shard_lengths is None:
        raise ValueError(
            "the data set has no shards (no `shard_lengths`) to be read forward; take one that has, such as lines, or "
            "another sampler, such as shuffled"
        )
    if lanes < 1:
        raise ValueError(f"lanes = {lanes}: expected at least 1")
    if batch_size % lanes:
        below = batch_size - batch_size % lanes
        near = sorted({max(lanes, below), below + lanes})
        fitting = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        numbers = [n for n in fitting if n < lanes][-1:] + [n for n in fitting if n > lanes][:1]
        raise ValueError(
            f"lanes = {lanes} and batch_size = {batch_size}: every batch takes equally many samples from each lane; "
            f"nearest batch sizes that work: {_listed(near)}; nearest lanes: {_listed(numbers)}"
        )
    return Lanes(batch_size, shard_lengths, lanes, shuffle=shuffle)


class Lanes:
    """Cuts a pass, shard after shard, into equal runs, the lanes, and takes an equal piece of each
    into every batch.

    So the k-th lane of L goes forward by B / L samples per batch of B, and W processes, which each
    take a slice of every batch, read L / W lanes each, and about 1 / W of the data. How far each
    shard has been read is a function of the place in the pass: nothing has to be saved, merged or
    split where their number changes. A last batch that is not full takes what is left of each lane,
    their lengths being equal to within one sample.

    Args:
        batch_size: samples per step, over all processes.
        shard_lengths: samples of each shard.
        lanes: divides the batch size.
        shuffle: every pass has the shards in another order.
    """

    def __init__(
        self, batch_size: int, shard_lengths: Sequence[int], lanes: int, *, shuffle: bool = True
    ) -> None:
        self.batch_size = batch_size
        self._lengths = np.array(shard_lengths, dtype=np.int64)
        self._lanes = lanes
        self._shuffle = shuffle

    def __call__(self, length: int, seed: int) -> Pass:
        """Return the indices of a pass, made where they are asked for; memory is that of the
        shards' numbers."""
        if length != self._lengths.sum():
            raise ValueError(
                f"the data set has {length} samples, and its shards have {self._lengths.sum()}"
            )
        count = len(self._lengths)
        generator = np.random.Generator(np.random.Philox(key=seed))
        shards = generator.permutation(count) if self._shuffle else np.arange(count)
        return _LanesPass(self.batch_size, self._lanes, self._lengths, shards)


class _LanesPass:
    def __init__(self, batch_size: int, lanes: int, lengths: Indices, shards: Indices) -> None:
        self._batch = batch_size
        self._lanes = lanes
        self._piece = batch_size // lanes
        self._length = int(lengths.sum())
        self._batches, self._rest = divmod(self._length, batch_size)
        self._ends = np.cumsum(lengths[shards])
        # What a place in the order of the shards lacks to the index that it stands for.
        self._shifts: Indices = (np.cumsum(lengths) - lengths)[shards] - (
            self._ends - lengths[shards]
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, ordinals: slice) -> Indices:
        """Return the indices at some ordinals, int64 `(N,)`."""
        asked = np.arange(*ordinals.indices(self._length), dtype=np.int64)
        full = self._batches * self._batch
        places = np.where(
            asked < full, self._in_full_batches(asked), self._in_the_last(asked - full)
        )
        shards = np.searchsorted(self._ends, places, side="right")
        return places + self._shifts[shards]

    def _in_full_batches(self, ordinals: Indices) -> Indices:
        batch = ordinals // self._batch
        within = ordinals % self._batch
        lane = within // self._piece
        at = within % self._piece
        return self._begin(lane) + batch * self._piece + at

    def _in_the_last(self, ordinals: Indices) -> Indices:
        """Return the places of the last batch, which is not full, by their number in it."""
        if not self._rest:
            return ordinals
        lane = np.clip(-(-(self._lanes * (ordinals + 1)) // self._rest) - 1, 0, self._lanes - 1)
        return (
            self._begin(lane)
            + self._batches * self._piece
            + ordinals
            - self._rest * lane // self._lanes
        )

    def _begin(self, lane: Indices) -> Indices:
        return lane * (self._batches * self._piece) + self._rest * lane // self._lanes


def _few(numbers: Sequence[int]) -> str:
    if numbers:
        return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
    return "no"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
