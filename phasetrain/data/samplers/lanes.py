"""An order in which every rank reads the shards of a dataset forward."""

from collections.abc import Sequence

import numpy as np

from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Order, Pass
from phasetrain.runtime.format import join_first


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
            f"nearest batch sizes that work: {join_first(near, 6)}; nearest lanes: {join_first(numbers, 6)}"
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
