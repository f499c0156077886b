"""A sampler of torch's kind, whose passes are lists that it draws, as an order that is a function
of a seed."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Order
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import preserve_generators, reseed_all, seed_of

ANY_SEED = seed_of(0, "purity of a sampler")


@runtime_checkable
class Sharing(Protocol):
    """A sampler that gives each process its share, as torch's DistributedSampler does."""

    num_replicas: int
    rank: int


@runtime_checkable
class Epochal(Protocol):
    """A sampler with a generator of its own, which is seeded anew for each pass."""

    def set_epoch(self, epoch: int, /) -> None:
        """Take over the number that the next pass is a function of."""
        ...


class TorchOrder:
    """Makes each pass a list of what a sampler gives, drawn as a whole under generators seeded for
    it.

    The global generators of torch, NumPy and Python are seeded, and put back afterwards; a sampler
    with `set_epoch` gets a number that is another one in every pass. So a pass is a function of its
    seed, any place of it is reached by slicing, and nothing of the sampler has to be saved.

    Args:
        sampler: gives indices.
        where: the config key, for messages.

    Raises:
        ConfigError: it shares out samples among processes, gives no indices, or another list for
            the same seed.
    """

    def __init__(self, sampler: Iterable[Any], where: str) -> None:
        kind = type(sampler).__name__
        if isinstance(sampler, Sharing):
            raise ConfigError(
                f"{where}: {kind} gives each process a share of the samples, and phasetrain shares out each batch "
                "itself, so every sample would be seen by one process of one; take a sampler that gives all "
                "samples, such as shuffled"
            )
        self._sampler = sampler
        self._where = where
        drawn = self._drawn(ANY_SEED)
        if not np.array_equal(drawn, self._drawn(ANY_SEED)):
            raise ConfigError(
                f"{where}: {kind} gives another order for the same seed, so no resume could be exact: it has a "
                "generator or counts passes of its own. Let it draw from the global generators of torch, NumPy or "
                "Python, which are seeded before each pass, or give it a method `set_epoch(number)` and seed its "
                "generator with that"
            )
        self._count = len(drawn)

    def samples(self, length: int) -> int:
        """Return the number of samples of a pass."""
        return self._count

    def __call__(self, length: int, seed: int) -> Indices:
        """Return the indices of one pass, int64 `(N,)`.

        Raises:
            ConfigError: it has another number of samples than the pass before.
        """
        drawn = self._drawn(seed)
        if len(drawn) != self._count:
            raise ConfigError(
                f"{self._where} gave {len(drawn)} samples for a pass and {self._count} for another; a plan needs "
                "passes of equal length"
            )
        return drawn

    def _drawn(self, seed: int) -> Indices:
        with preserve_generators():
            reseed_all(seed)
            if isinstance(self._sampler, Epochal):
                self._sampler.set_epoch(seed & 0x7FFFFFFF)
            listed = list(self._sampler)
        odd = next((one for one in listed if isinstance(one, list | tuple)), None)
        if odd is not None:
            raise ConfigError(
                f"{self._where}: {type(self._sampler).__name__} gives lists, such as one of {len(odd)} indices, "
                "expected indices one by one; batches are made of them by batch_size"
            )
        found = np.array([int(one) for one in listed], dtype=np.int64)
        if not len(found):
            raise ConfigError(f"{self._where}: {type(self._sampler).__name__} gives no samples")
        return found


def as_order(found: Any, where: str) -> Order:
    """Return what a sampler's name gave as an order: an order as it is, an iterable of torch's kind
    as `TorchOrder`.

    Raises:
        ConfigError: it is neither, or an iterable that does not do; see `TorchOrder`.
    """
    if callable(found):
        order: Callable[..., Any] = found
        return order
    if isinstance(found, Iterable):
        return TorchOrder(found, where)
    raise ConfigError(
        f"{where} gave {type(found).__name__}, expected a function of the number of samples and a seed, or a sampler "
        "of torch's kind"
    )
