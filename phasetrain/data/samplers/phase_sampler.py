"""Which samples a step gets: a pure function of seed, phase, process and step, so that resuming is
slicing."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from phasetrain.config.registry import Registry
from phasetrain.data.samplers.permutation import Identity, Indices, Permutation
from phasetrain.distributed import World
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runtime.machine import seed_of

LARGEST_TABLE = 2**20
"""Samples up to which a shuffled pass is made as a whole; longer ones are computed piece by
piece."""


@runtime_checkable
class Pass(Protocol):
    """The indices of one pass: an int64 array, or what makes any slice of it when it is asked
    for."""

    def __len__(self) -> int:
        """Return the number of samples of the pass."""
        ...

    def __getitem__(self, ordinals: slice, /) -> Indices:
        """Return the indices at `[begin:end]` of the pass, int64 `(end - begin,)`, always the same
        ones."""
        ...


class Order(Protocol):
    """The order of the samples within one pass over a split."""

    def __call__(self, length: int, seed: int) -> Pass:
        """Return the indices of one pass, `length` of them, as a pure function of its arguments.

        Where data sets are so large that a whole pass should not be computed before the first step,
        return an object with a length and slices instead of an array.

        Args:
            length: samples of the split.
            seed: 64-bit seed of this pass.
        """
        ...


@runtime_checkable
class BatchOrder(Protocol):
    """An order that is made for batches of one size, so that a pass cannot go on with batches of
    another."""

    batch_size: int


@runtime_checkable
class OwnLength(Protocol):
    """An order whose passes have another number of samples than the data set."""

    def samples(self, length: int) -> int:
        """Return the number of samples of a pass over a data set of `length` samples, the same for
        every pass."""
        ...


def pass_length(order: Order, length: int) -> int:
    """Return the number of samples of a pass over `length` samples in an order."""
    if isinstance(order, OwnLength):
        return order.samples(length)
    return length


SAMPLERS: Registry[Order] = Registry("sampler", "DATA.*.sampler")


@SAMPLERS.register("shuffled")
def shuffled() -> Order:
    """Return the order in which every pass is a permutation of its own.

    NumPy's Philox generator gives the permutations of up to 2**20 samples, a network that reaches
    any place of a pass at once those of more (`phasetrain.data.samplers.permutation.Permutation`).
    """

    def order(length: int, seed: int) -> Pass:
        if length > LARGEST_TABLE:
            return Permutation(length, seed)
        return (
            np.random.Generator(np.random.Philox(key=seed))
            .permutation(length)
            .astype(np.int64, copy=False)
        )

    return order


@SAMPLERS.register("sequential")
def sequential() -> Order:
    """Return the order of the data set itself."""

    def order(length: int, seed: int) -> Pass:
        return Identity(length)

    return order


class Draw(NamedTuple):
    """The samples of one micro-batch of one process.

    Attributes:
        split: name of the split.
        epoch: pass over the training data.
        ordinal: place of the first sample within the pass; the others follow one by one.
        indices: their indices in the data set, int64 `(N,)`.
        counts: whether they do; a process whose share has run out while others have more gets
            samples that do not.
        stage: number of the stage, which may have transforms of its own.
    """

    split: str
    epoch: int
    ordinal: int
    indices: Indices
    counts: bool = True
    stage: int = 0


class PhaseSampler:
    """Draws of one process for the phases of one split.

    Args:
        order: order of the samples within a pass.
        length: samples of the split.
        seed: the run's seed.
        micro_batch_size: samples per draw.
        world: the processes; each takes its slice of every global batch, so the samples of a step
            do not depend on their number.
        fixed: a short batch is cut where a full one would be, so that micro-batches do not depend
            on it either; those at its end are empty then.
        windows: samples of successive passes, where each goes over a window of the data.
    """

    def __init__(
        self,
        order: Order,
        length: int,
        *,
        seed: int,
        micro_batch_size: int,
        world: World,
        fixed: bool = False,
        windows: Sequence[int] = (),
    ) -> None:
        self._windows = [0, *accumulate(windows)]
        self._fixed = fixed
        self._order = order
        self._length = length
        self._seed = seed
        self._micro = micro_batch_size
        self._world = world
        self._pass: tuple[tuple[str, int], Pass] | None = None

    @property
    def in_step(self) -> bool:
        """Whether others make the same number of draws for each step, so that none of them may be
        left out."""
        return self._fixed or not self._world.is_single_process

    def steps(self, phase: Phase, start: int = 0) -> Iterator[list[Draw]]:
        """Yield the draws of each step of `phase` from step `start` on.

        Raises:
            ChangedError: the phase, planned before the data was changed, goes beyond its end, or
                the batch size of an order that is made for one was changed in the middle of a pass.
            ConfigError: the order function did not give one index of the split per sample; what
                makes indices when they are asked for is looked at then.
        """
        length = pass_length(self._order, self._window(phase.epoch)[0])
        if start < phase.steps and phase.offset + phase.samples > length:
            raise ChangedError(
                f"DATA.{phase.data.upper()} has {length} samples now, and the phase under way goes up to "
                f"{phase.offset + phase.samples}; bring the data back, or start anew in another folder with RUN.dir=..."
            )
        if start < phase.steps:
            check_batches(self._order, phase)
        indices = self._indices(phase)
        for step in range(start, phase.steps):
            first = phase.offset + step * phase.batch_size
            samples = phase.samples_in(step)
            begin, end = self._share(first, samples, phase.batch_size)
            draws = [
                Draw(
                    phase.data,
                    phase.epoch,
                    at,
                    indices[at : min(at + self._micro, end)],
                    stage=phase.stage,
                )
                for at in range(begin, end, self._micro)
            ]
            if self._fixed or not self._world.is_single_process:
                draws += self._fill(phase, first, samples, len(draws), indices)
            yield draws

    def _share(self, first: int, samples: int, batch_size: int) -> tuple[int, int]:
        """Return this process's slice of a batch."""
        if not self._fixed:
            return self._world.shard(first, first + samples)
        begin, end = self._world.shard(first, first + batch_size)
        return min(begin, first + samples), min(end, first + samples)

    def _fill(
        self, phase: Phase, first: int, samples: int, drawn: int, indices: Pass
    ) -> list[Draw]:
        """Return the draws that this process lacks: all make the same number, as they do each pass
        together."""
        most = ceil(
            ceil((phase.batch_size if self._fixed else samples) / self._world.size) / self._micro
        )
        if drawn == most:
            return []
        stand_ins = indices[first : first + min(samples, self._micro)]
        return [
            Draw(phase.data, phase.epoch, first, stand_ins, counts=False, stage=phase.stage)
        ] * (most - drawn)

    def _indices(self, phase: Phase) -> Pass:
        key = (phase.data, phase.epoch)
        if self._pass is None or self._pass[0] != key:
            length, begin = self._window(phase.epoch)
            found = self._order(length, seed_of(self._seed, "order", *key))
            count = pass_length(self._order, length)
            checked = _checked(f"DATA.{phase.data.upper()}.sampler", found, count, below=length)
            self._pass = key, _Shifted(checked, begin) if begin else checked
        return self._pass[1]

    def _window(self, epoch: int) -> tuple[int, int]:
        """Return how many samples a pass has, and the first of them."""
        count = len(self._windows) - 1
        if not count:
            return self._length, 0
        begin = self._windows[epoch % count]
        end = self._windows[epoch % count + 1]
        return end - begin, begin


def _checked(where: str, found: Any, count: int, *, below: int) -> Pass:
    """Return a pass whose indices are looked at: those of an array now, all others when they are
    made."""
    if isinstance(found, np.ndarray):
        _check(where, "a pass", found, count, below=below)
        return found
    given = type(found).__name__
    if isinstance(found, Pass):
        if len(found) == count:
            return _CheckedPass(where, found, below)
        given = f"{given} of length {len(found)}"
    raise ConfigError(
        f"{where} gave {given} for a pass, expected an int64 array ({count},), or an object of that length "
        "whose slices are int64 arrays"
    )


def check_batches(order: Order, phase: Phase) -> None:
    """Refuse a phase whose place in its pass was not reached in batches of the size that an order
    is made for.

    Raises:
        ChangedError: the batch size was changed in the middle of a pass.
    """
    if not isinstance(order, BatchOrder):
        return
    batch_size = order.batch_size
    if (phase.batch_size, phase.offset) != (batch_size, phase.first * batch_size):
        where = f"DATA.{phase.data.upper()}"
        raise ChangedError(
            f"{where}.batch_size = {batch_size}: the order that {where}.sampler gives depends on it, and "
            f"{phase.offset} samples of the pass under way were taken in the order for another size; take the old "
            "one back, and change it at the end of an epoch"
        )


class _Shifted:
    """A pass over a window of the data."""

    def __init__(self, indices: Pass, begin: int) -> None:
        self._indices = indices
        self._begin = begin

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, ordinals: slice) -> Indices:
        return self._indices[ordinals] + self._begin


class _CheckedPass:
    def __init__(self, where: str, indices: Pass, below: int) -> None:
        self._where = where
        self._indices = indices
        self._length = len(indices)
        self._below = below

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, ordinals: slice) -> Indices:
        found, (begin, end, _) = self._indices[ordinals], ordinals.indices(self._length)
        _check(
            self._where,
            f"samples {begin} to {end - 1} of a pass",
            found,
            end - begin,
            below=self._below,
        )
        return found


def _check(where: str, what: str, found: Any, count: int, *, below: int) -> None:
    """Refuse what is not `count` indices in [0, below)."""
    if not isinstance(found, np.ndarray) or found.dtype != np.int64 or found.shape != (count,):
        if isinstance(found, np.ndarray):
            kind = f"{found.dtype} {found.shape}"
        else:
            kind = type(found).__name__
        raise ConfigError(f"{where} gave {kind} for {what}, expected int64 ({count},)")
    if found.view(np.uint64).max(initial=0) >= below:  # a negative number is a large one then
        wrong = found[(found < 0) | (found >= below)][0]
        raise ConfigError(
            f"{where} gave index {wrong} for {what}, expected indices from 0 to {below - 1}"
        )
