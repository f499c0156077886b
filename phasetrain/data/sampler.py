"""Which samples a step gets: a pure function of seed, phase, process and step, so that resuming is slicing."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phasetrain.distributed import World
from phasetrain.errors import ChangedError
from phasetrain.machine import seed_of
from phasetrain.plan import Phase
from phasetrain.registry import Registry

Indices = NDArray[np.int64]


class Order(Protocol):
    """The order of the samples within one pass over a split."""

    def __call__(self, length: int, seed: int) -> Indices:
        """Return the indices of one pass, int64 `(length,)`, as a pure function of its arguments.

        Args:
            length: samples of the split.
            seed: 64-bit seed of this pass.
        """
        ...


SAMPLERS: Registry[Order] = Registry("sampler", "DATA.*.sampler")


@SAMPLERS.register("shuffled")
def shuffled() -> Order:
    """Return the order in which every pass is a permutation of its own (NumPy's Philox generator)."""

    def order(length: int, seed: int) -> Indices:
        return np.random.Generator(np.random.Philox(key=seed)).permutation(length).astype(np.int64, copy=False)

    return order


@SAMPLERS.register("sequential")
def sequential() -> Order:
    """Return the order of the data set itself."""

    def order(length: int, seed: int) -> Indices:
        return np.arange(length, dtype=np.int64)

    return order


class Draw(NamedTuple):
    """The samples of one micro-batch of one process.

    Attributes:
        split: name of the split.
        epoch: pass over the training data.
        ordinal: place of the first sample within the pass; the others follow one by one.
        indices: their indices in the data set, int64 `(N,)`.
    """

    split: str
    epoch: int
    ordinal: int
    indices: Indices


class PhaseSampler:
    """Draws of one process for the phases of one split.

    Args:
        order: order of the samples within a pass.
        length: samples of the split.
        seed: the run's seed.
        micro_batch_size: samples per draw.
        world: the processes; each takes its slice of every global batch, so the samples of a step do not
            depend on their number.
    """

    def __init__(self, order: Order, length: int, *, seed: int, micro_batch_size: int, world: World) -> None:
        self._order = order
        self._length = length
        self._seed = seed
        self._micro = micro_batch_size
        self._world = world
        self._pass: tuple[tuple[str, int], Indices] | None = None

    def steps(self, phase: Phase, start: int = 0) -> Iterator[list[Draw]]:
        """Yield the draws of each step of `phase` from step `start` on.

        Raises:
            ChangedError: the phase, planned before the data was changed, goes beyond its end.
            ValueError: the order function did not give one index per sample.
        """
        if start < phase.steps and phase.offset + phase.samples > self._length:
            raise ChangedError(
                f"DATA.{phase.split.upper()} has {self._length} samples now, and the phase under way goes up to "
                f"{phase.offset + phase.samples}; bring the data back, or start anew in another folder with RUN.dir=..."
            )
        indices = self._indices(phase)
        for step in range(start, phase.steps):
            first = phase.offset + step * phase.batch_size
            begin, end = self._world.share(first, first + phase.samples_in(step))
            yield [
                Draw(phase.split, phase.epoch, at, indices[at : min(at + self._micro, end)])
                for at in range(begin, end, self._micro)
            ]

    def _indices(self, phase: Phase) -> Indices:
        key = (phase.split, phase.epoch)
        if self._pass is None or self._pass[0] != key:
            found = self._order(self._length, seed_of(self._seed, "order", *key))
            if found.shape != (self._length,) or found.dtype != np.int64:
                raise ValueError(
                    f"DATA.{phase.split.upper()}.sampler gave {found.dtype} {found.shape} for a pass, expected int64 "
                    f"({self._length},)"
                )
            self._pass = key, found
        return self._pass[1]
