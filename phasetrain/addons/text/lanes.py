"""An order in which every rank reads the shards of a dataset forward."""

from collections.abc import Sequence

import numpy as np

from phasetrain.config.checks import check_at_least
from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder
from phasetrain.runtime.format import join_first


@SAMPLERS.register("lanes")
def lanes(
    batch_size: int,
    shard_lengths: Sequence[int] | None = None,
    *,
    lanes: int = 8,
    shuffle: bool = True,
) -> SampleOrder:
    """An order in which every rank reads shards forward, each in its own part of an epoch; see
    `LaneOrder`.

    Args:
        batch_size: fact; samples per update or test step, over all ranks.
        shard_lengths: fact; number of samples of each shard.
        lanes: number of positions at which an epoch is read at once; with a world size that divides
            it, ranks share shards only at the borders of their parts.
        shuffle: shuffle the shards in each epoch; the order within a shard is kept.

    Raises:
        ValueError: the dataset has no shards, or lanes does not divide the batch.
    """
    if shard_lengths is None:
        raise ValueError(
            "the dataset has no shards (no `shard_lengths`) to read forward; use one that has, "
            "such as lines, or another sampler, such as shuffled"
        )
    check_at_least(1, lanes=lanes)
    if batch_size % lanes:
        below = batch_size - batch_size % lanes
        near = sorted({max(lanes, below), below + lanes})
        fitting = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        numbers = [n for n in fitting if n < lanes][-1:] + [n for n in fitting if n > lanes][:1]
        raise ValueError(
            f"lanes = {lanes} and batch_size = {batch_size}: the batch size has to be a multiple "
            f"of the lanes; nearest valid batch sizes: {join_first(near, 6)}; nearest valid lanes: "
            f"{join_first(numbers, 6)}"
        )
    return LaneOrder(batch_size, shard_lengths, lanes, shuffle=shuffle)


class LaneOrder:
    """Cuts an epoch, shard after shard, into equal runs, the lanes, and takes an equal piece of
    each for every batch.

    The k-th lane of L advances by B / L samples per batch of B, and W ranks, which each take a
    slice of every batch, read L / W lanes each, and about 1 / W of the data. The position in each
    shard is a function of the position in the epoch: there is nothing to save, merge or split if
    the world size changes. A last, smaller batch takes the remainder of each lane; their lengths
    are equal to within one sample.

    Args:
        batch_size: samples per step, over all ranks.
        shard_lengths: number of samples of each shard.
        lanes: number of lanes, which divides the batch size.
        shuffle: shuffle the shards in each epoch.
    """

    def __init__(
        self, batch_size: int, shard_lengths: Sequence[int], lanes: int, *, shuffle: bool = True
    ) -> None:
        self.batch_size = batch_size
        self._lengths = np.array(shard_lengths, dtype=np.int64)
        self._lanes = lanes
        self._shuffle = shuffle

    def __call__(self, length: int, seed: int) -> EpochOrder:
        """Return the indices of an epoch, computed on access; memory is proportional to the number
        of shards."""
        if length != self._lengths.sum():
            raise ValueError(
                f"the dataset has {length} samples, and its shards have {self._lengths.sum()}"
            )
        count = len(self._lengths)
        generator = np.random.Generator(np.random.Philox(key=seed))
        shards = generator.permutation(count) if self._shuffle else np.arange(count)
        return _LanePass(self.batch_size, self._lanes, self._lengths, shards)


class _LanePass:
    def __init__(self, batch_size: int, lanes: int, lengths: Indices, shards: Indices) -> None:
        self._batch = batch_size
        self._lanes = lanes
        self._piece = batch_size // lanes
        self._length = int(lengths.sum())
        self._batches, self._rest = divmod(self._length, batch_size)
        self._sizes = lengths[shards]
        self._ends = np.cumsum(self._sizes)
        # Difference between an index and its position in the shuffled order of shards.
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
            asked < full,
            self._locate_in_full_batches(asked),
            self._locate_in_last_batch(asked - full),
        )
        shards = np.searchsorted(self._ends, places, side="right")
        return places + self._shifts[shards]

    def find(self, indices: Indices) -> Indices:
        """Return the positions of some samples, int64."""
        asked = indices[(indices >= 0) & (indices < self._length)]
        # Shards are found by their first index in the dataset, which they have in another order.
        begins = self._ends + self._shifts - self._sizes
        # Empty shards begin where the next one does, and come before it.
        by_begin = np.lexsort((self._sizes, begins))
        shards = by_begin[np.searchsorted(begins[by_begin], asked, side="right") - 1]
        places = asked - self._shifts[shards]
        borders = self._lane_begin(np.arange(self._lanes, dtype=np.int64))
        lane = np.searchsorted(borders, places, side="right") - 1
        within = places - borders[lane]
        in_full = within < self._batches * self._piece
        full = within // self._piece * self._batch + lane * self._piece + within % self._piece
        last = self._batches * self._batch + self._rest * lane // self._lanes
        positions: Indices = np.where(in_full, full, last + within - self._batches * self._piece)
        return positions

    def _locate_in_full_batches(self, ordinals: Indices) -> Indices:
        batch = ordinals // self._batch
        within = ordinals % self._batch
        lane = within // self._piece
        at = within % self._piece
        return self._lane_begin(lane) + batch * self._piece + at

    def _locate_in_last_batch(self, ordinals: Indices) -> Indices:
        """Return the positions of samples of the last, smaller batch, by their number in it."""
        # Without a short batch nothing is located here, and the division below would fail.
        if not self._rest:
            return ordinals
        # The inverse of `_lane_begin`; clipped, because np.where evaluates this for samples of full
        # batches as well, whose numbers are negative here.
        lane = np.clip(-(-(self._lanes * (ordinals + 1)) // self._rest) - 1, 0, self._lanes - 1)
        return (
            self._lane_begin(lane)
            + self._batches * self._piece
            + ordinals
            - self._rest * lane // self._lanes
        )

    def _lane_begin(self, lane: Indices) -> Indices:
        return lane * (self._batches * self._piece) + self._rest * lane // self._lanes
