"""The samples of each step: a pure function of seed, phase, rank and step, so resuming is
slicing."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import numpy as np

from phasetrain.config.registry import Registry, parameters
from phasetrain.data.samplers.excluded import ExcludedSamples
from phasetrain.data.samplers.locate import EpochOrder, find_positions
from phasetrain.data.samplers.permutation import Identity, Indices, Permutation
from phasetrain.distributed import World
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runtime.machine import seed_of

LARGEST_TABLE = 2**20
"""Maximum length of a pass that is shuffled as a whole; longer ones are computed in chunks."""


class SampleOrder(Protocol):
    """The order of the samples within one epoch of a split.

    An order with a third parameter `epoch` also gets the number of the epoch, from 0. An order
    whose epochs have a different number of samples than the dataset has a method `samples(length)`,
    which returns it, the same for all epochs. An order made for one batch size, so that an epoch
    cannot continue with another one, has an attribute `batch_size`.
    """

    def __call__(self, length: int, seed: int) -> EpochOrder:
        """Return the indices of one epoch, `length` of them, as a pure function of the arguments.

        For datasets so large that an epoch should not be computed before the first step, return an
        object with a length and slices instead of an array.

        Args:
            length: number of samples of the split.
            seed: 64-bit seed of this epoch.
        """
        ...


class SplitsBatches(SampleOrder, Protocol):
    """An order that decides how the samples of a step are divided into micro-batches."""

    @property
    def splits(self) -> bool:
        """Whether it does, with the parameters that it was made with."""
        ...

    def split(self, indices: Indices, most: int) -> list[int]:
        """Return the sizes of the micro-batches of some samples, a pure function.

        Args:
            indices: indices of the samples of one rank, in order.
            most: maximum size.
        """
        ...


def splits_batches(order: SampleOrder) -> TypeGuard[SplitsBatches]:
    """Return whether an order divides the samples of a step into micro-batches itself."""
    return bool(getattr(order, "splits", False))


def split_samples(order: SampleOrder, indices: Indices, most: int) -> list[int]:
    """Return the sizes of the micro-batches of some samples, see `SplitsBatches.split`."""
    # Not by `splits_batches`, which would be one more call per step.
    if getattr(order, "splits", False):
        return cast(SplitsBatches, order).split(indices, most)
    count = len(indices)
    return [min(most, count - begin) for begin in range(0, count, most)]


def pass_length(order: SampleOrder, length: int) -> int:
    """Return the number of samples of an epoch over `length` samples in an order."""
    count_samples: Callable[[int], int] | None = getattr(order, "samples", None)
    return length if count_samples is None else count_samples(length)


def draw_pass(order: SampleOrder, length: int, seed: int, epoch: int) -> EpochOrder:
    """Return the indices of one epoch; an order that has a parameter `epoch` gets its number.

    Args:
        order: order of the samples.
        length: number of samples of the split.
        seed: 64-bit seed of this epoch.
        epoch: number of the epoch in the run, from 0; a test has the number of the epoch before it.
    """
    # The extra parameter is a choice of the user's function, which no protocol can declare.
    draw: Callable[..., EpochOrder] = order
    if "epoch" in parameters(order):
        draw = partial(draw, epoch=epoch)
    return draw(length, seed)


SAMPLERS: Registry[SampleOrder] = Registry("sampler", "DATA.*.sampler")


@SAMPLERS.register("shuffled")
def make_shuffled() -> SampleOrder:
    """An order in which every epoch is a different permutation.

    Up to 2**20 samples the permutation comes from NumPy's Philox generator, above that from
    `phasetrain.data.samplers.permutation.Permutation`.
    """

    def make_pass(length: int, seed: int) -> EpochOrder:
        if length > LARGEST_TABLE:
            return Permutation(length, seed)
        return (
            np.random.Generator(np.random.Philox(key=seed))
            .permutation(length)
            .astype(np.int64, copy=False)
        )

    return make_pass


@SAMPLERS.register("sequential")
def make_sequential() -> SampleOrder:
    """The order of the dataset itself."""

    def make_pass(length: int, seed: int) -> EpochOrder:
        return Identity(length)

    return make_pass


class ConsecutivePasses:
    """An order whose epochs continue where the one before has ended, for data that draws other
    random numbers in each pass.

    Args:
        count: number of samples in an epoch.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def samples(self, length: int) -> int:
        """Return the number of samples per epoch."""
        return self._count

    def __call__(self, length: int, seed: int, epoch: int = 0) -> EpochOrder:
        """Return the indices of an epoch."""
        begin = epoch * self._count
        return MappedPass(
            Identity(self._count), lambda indices: indices + begin, lambda indices: indices - begin
        )


class Draw(NamedTuple):
    """The samples of one micro-batch of one rank.

    Attributes:
        split: name of the split.
        epoch: epoch of the training data; 0 in tests, which draw the same random numbers each time.
        ordinal: position of the first sample within the epoch; the others follow.
        indices: indices in the dataset, int64 `(N,)`.
        counts: whether the samples count; a rank that has run out of samples gets padding that does
            not.
        stage: number of the stage, which may have its own transforms.
        kept: positions of the samples after the first, int64 `(N,)`, if some in between are
            excluded; None: they follow one another.
    """

    split: str
    epoch: int
    ordinal: int
    indices: Indices
    counts: bool = True
    stage: int = 0
    kept: Indices | None = None

    @property
    def ordinals(self) -> Indices:
        """Position of each sample within the epoch, int64 `(N,)`."""
        if self.kept is None:
            return np.arange(self.ordinal, self.ordinal + len(self.indices), dtype=np.int64)
        return self.ordinal + self.kept


class PhaseSampler:
    """The draws of one rank for the phases of one split.

    Args:
        order: order of the samples within an epoch.
        length: number of samples of the split.
        seed: seed of the run.
        micro_batch_size: samples per draw.
        world: the ranks; each takes a slice of every global batch, so the samples of a step do not
            depend on the world size.
        fixed: cut a short batch where a full one would be cut, so that micro-batches do not depend
            on the world size either; the last ones may be empty.
        windows: lengths of successive windows of the data, if each epoch covers one.

    Attributes:
        excluded: samples to leave out of their batches; None: none.
    """

    def __init__(
        self,
        order: SampleOrder,
        length: int,
        *,
        seed: int,
        micro_batch_size: int,
        world: World,
        fixed: bool = False,
        windows: Sequence[int] = (),
    ) -> None:
        self.excluded: ExcludedSamples | None = None
        self._windows = [0, *accumulate(windows)]
        self._fixed = fixed
        self._order = order
        self._length = length
        self._seed = seed
        self._micro = micro_batch_size
        self._world = world
        self._pass: tuple[tuple[str, int], EpochOrder] | None = None

    @property
    def in_step(self) -> bool:
        """Whether all ranks make the same number of draws per step, so that none may be skipped."""
        return self._fixed or not self._world.is_single_process

    def steps(self, phase: Phase, start: int = 0) -> Iterator[list[Draw]]:
        """Yield the draws of each step of `phase` from step `start` on; a step whose samples are
        all excluded has none.

        Raises:
            ChangedError: the phase was planned before the data changed and exceeds it, or the batch
                size of an order made for one was changed in the middle of an epoch.
            ConfigError: the sampler did not return one index of the split per sample; computed
                passes are checked on access.
        """
        length = pass_length(self._order, self._find_window(phase.epoch)[0])
        if start < phase.steps and phase.offset + phase.samples > length:
            raise ChangedError(
                f"DATA.{phase.data.upper()} has {length} samples now, and the current phase needs "
                f"{phase.offset + phase.samples}; restore the data, or start a new run with "
                "RUN.dir=...",
                code="resume.data_changed",
            )
        if start < phase.steps:
            check_batches(self._order, phase)
        indices = self._get_pass(phase)
        epoch = phase.epoch if phase.is_train else 0
        for step in range(start, phase.steps):
            first = phase.offset + step * phase.batch_size
            samples = phase.samples_in(step)
            begin, end = self._find_shard(first, samples, phase.batch_size)
            draws = []
            at = begin
            for size in split_samples(self._order, indices[begin:end], self._micro):
                chosen = indices[at : at + size]
                draws.append(Draw(phase.data, epoch, at, chosen, stage=phase.stage))
                at += size
            if self.in_step:
                draws += self._make_padding(phase, first, samples, len(draws), indices)
            if self.excluded is not None:
                draws = self._remove_excluded(draws, first, indices[first : first + samples])
            yield draws

    def find_pass(self, phase: Phase) -> EpochOrder:
        """Return the indices of the epoch of a phase."""
        return self._get_pass(phase)

    def _remove_excluded(self, draws: list[Draw], first: int, batch: Indices) -> list[Draw]:
        """Return the draws of a step without the excluded samples.

        Args:
            draws: draws of this rank.
            first: position of the step in the epoch.
            batch: indices of the samples of all ranks.
        """
        assert self.excluded is not None
        left = self.excluded.find_kept(batch)
        if len(left) == len(batch):
            return draws
        # Decided from the samples of all ranks: either all make passes, or none does.
        if not len(left):
            return []
        kept = left[: self._micro]
        remaining = []
        for draw in draws:
            own = self.excluded.find_kept(draw.indices)
            if draw.counts and len(own):
                remaining.append(draw._replace(indices=draw.indices[own], kept=own))
            elif self.in_step:
                # Made of samples that are left, since even padding moves the statistics of batch
                # norms.
                padding = draw._replace(ordinal=first, indices=batch[kept], counts=False, kept=kept)
                remaining.append(padding)
        return remaining

    def _find_shard(self, first: int, samples: int, batch_size: int) -> tuple[int, int]:
        """Return this rank's slice of a batch."""
        if not self._fixed:
            return self._world.shard(first, first + samples)
        # Cut like a full batch and then clipped: a sample stays on the rank and in the micro-batch
        # that it would have in a full batch.
        begin, end = self._world.shard(first, first + batch_size)
        return min(begin, first + samples), min(end, first + samples)

    def _make_padding(
        self, phase: Phase, first: int, samples: int, made: int, indices: EpochOrder
    ) -> list[Draw]:
        """Return the draws that this rank lacks: all ranks run the same number of forward passes,
        because each pass may contain collectives."""
        # From what all ranks know about the step, so that no rank has to ask the others.
        if splits_batches(self._order):
            shards = [
                World(rank, self._world.size).shard(first, first + samples)
                for rank in range(self._world.size)
            ]
            most = max(
                len(split_samples(self._order, indices[begin:end], self._micro))
                for begin, end in shards
            )
        else:
            share = ceil((phase.batch_size if self._fixed else samples) / self._world.size)
            most = ceil(share / self._micro)
        if made == most:
            return []
        padding = indices[first : first + min(samples, self._micro)]
        epoch = phase.epoch if phase.is_train else 0
        return [Draw(phase.data, epoch, first, padding, counts=False, stage=phase.stage)] * (
            most - made
        )

    def _get_pass(self, phase: Phase) -> EpochOrder:
        key = (phase.data, phase.epoch)
        if self._pass is None or self._pass[0] != key:
            length, begin = self._find_window(phase.epoch)
            seed = seed_of(self._seed, "order", *key)
            epoch_order = draw_pass(self._order, length, seed, phase.epoch)
            # Checked before the shift: the order is only asked about the window.
            count = pass_length(self._order, length)
            checked = _check_pass(
                f"DATA.{phase.data.upper()}.sampler", epoch_order, count, below=length
            )
            if begin:
                checked = MappedPass(
                    checked, lambda indices: indices + begin, lambda indices: indices - begin
                )
            self._pass = key, checked
        return self._pass[1]

    def _find_window(self, epoch: int) -> tuple[int, int]:
        """Return the number of samples of an epoch, and the index of the first."""
        count = len(self._windows) - 1
        if not count:
            return self._length, 0
        begin = self._windows[epoch % count]
        end = self._windows[epoch % count + 1]
        return end - begin, begin


def _check_pass(where: str, found: Any, count: int, *, below: int) -> EpochOrder:
    """Return a pass with checked indices: an array is checked now, anything else on access."""
    if isinstance(found, np.ndarray):
        _check_indices(where, "a pass", found, count, below=below)
        return found
    received = type(found).__name__
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        if len(found) == count:
            return _CheckedPass(where, found, below)
        received = f"{received} of length {len(found)}"
    raise ConfigError(
        f"{where}: it returned {received} for an epoch, expected an int64 array ({count},), or an "
        "object of that length whose slices are int64 arrays",
        code="config.invalid_order",
    )


def check_batches(order: SampleOrder, phase: Phase) -> None:
    """Reject a phase that begins in the middle of an epoch drawn for another batch size.

    Raises:
        ChangedError: the batch size was changed in the middle of an epoch.
    """
    batch_size = getattr(order, "batch_size", None)
    if batch_size is None:
        return
    if (phase.batch_size, phase.offset) != (batch_size, phase.first * batch_size):
        where = f"DATA.{phase.data.upper()}"
        raise ChangedError(
            f"{where}.batch_size = {batch_size}: the order of {where}.sampler depends on the batch "
            f"size, and {phase.offset} samples of the current epoch were drawn for another one; "
            "restore the old batch size, and change it at the end of an epoch",
            code="resume.batch_size_changed",
        )


class MappedPass:
    """A pass whose indices are replaced by a function of them.

    Args:
        indices: the original pass.
        replace: returns the new index for each of some indices.
        restore: returns the original index for each of some new indices; others are left out.
    """

    def __init__(
        self,
        indices: EpochOrder,
        replace: Callable[[Indices], Indices],
        restore: Callable[[Indices], Indices],
    ) -> None:
        self._indices = indices
        self._replace = replace
        self._restore = restore

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, ordinals: slice) -> Indices:
        """Return the new indices at some ordinals, int64 `(N,)`."""
        return self._replace(self._indices[ordinals])

    def find(self, indices: Indices) -> Indices:
        """Return the positions of some new indices, int64."""
        return find_positions(self._indices, self._restore(indices))


class _CheckedPass:
    def __init__(self, where: str, indices: EpochOrder, below: int) -> None:
        self._where = where
        self._indices = indices
        self._length = len(indices)
        self._below = below

    def __len__(self) -> int:
        return self._length

    def find(self, indices: Indices) -> Indices:
        return find_positions(self._indices, indices)

    def __getitem__(self, ordinals: slice) -> Indices:
        begin, end, _ = ordinals.indices(self._length)
        indices = self._indices[ordinals]
        _check_indices(
            self._where,
            f"samples {begin} to {end - 1} of a pass",
            indices,
            end - begin,
            below=self._below,
        )
        return indices


def _check_indices(where: str, what: str, found: Any, count: int, *, below: int) -> None:
    """Raise ConfigError unless `found` has `count` indices in [0, below)."""
    if not isinstance(found, np.ndarray) or found.dtype != np.int64 or found.shape != (count,):
        if isinstance(found, np.ndarray):
            received = f"{found.dtype} {found.shape}"
        else:
            received = type(found).__name__
        raise ConfigError(
            f"{where}: it returned {received} for {what}, expected int64 ({count},)",
            code="config.invalid_order",
        )
    # As unsigned numbers negative ones are large, so one comparison checks both bounds.
    if found.view(np.uint64).max(initial=0) >= below:
        wrong = found[(found < 0) | (found >= below)][0]
        raise ConfigError(
            f"{where}: it returned index {wrong} for {what}, expected indices from 0 to "
            f"{below - 1}",
            code="config.invalid_order",
        )
