"""Adapter for samplers of torch, which draw a list per epoch, to an order that is a function of a
seed."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SampleOrder
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import preserve_generators, reseed_all, seed_of

ANY_SEED = seed_of(0, "purity of a sampler")


class TorchOrder:
    """Makes each epoch a list drawn from a sampler of torch under seeded generators.

    The global generators of torch, NumPy and Python are seeded, and restored afterwards; a sampler
    with `set_epoch` gets the number of the epoch. So an epoch is a function of its seed and its
    number, any position is reached by slicing, and the sampler has no state to save.

    Args:
        sampler: yields indices.
        where: the config key, for messages.

    Raises:
        ConfigError: it shards samples over ranks, yields no indices, or a different list for the
            same seed.
    """

    def __init__(self, sampler: Iterable[Any], where: str) -> None:
        name = type(sampler).__name__
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            raise ConfigError(
                f"{where}: {name} shards the samples over ranks, and phasetrain shards each batch "
                "itself, so most samples would never be used; use a sampler of all samples, such "
                "as shuffled",
                code="config.sharding_sampler",
            )
        self._sampler = sampler
        self._where = where
        # Drawn twice at the start: an impure sampler would otherwise show only in a resumed run
        # that differs.
        drawn = self._draw_list(ANY_SEED, 0)
        if not np.array_equal(drawn, self._draw_list(ANY_SEED, 0)):
            raise ConfigError(
                f"{where}: {name} returns different orders for the same seed, so a resume could "
                "not be exact: it has its own generator or epoch counter. Let it draw from the "
                "global generators of torch, NumPy or Python, which are seeded before each epoch, "
                "or give it a method `set_epoch(epoch)` and seed its generator with that number",
                code="config.impure_sampler",
            )
        self._count = len(drawn)

    def samples(self, length: int) -> int:
        """Return the number of samples per epoch."""
        return self._count

    def __call__(self, length: int, seed: int, epoch: int = 0) -> Indices:
        """Return the indices of one epoch, int64 `(N,)`.

        Raises:
            ConfigError: the number of samples differs from the epoch before.
        """
        drawn = self._draw_list(seed, epoch)
        if len(drawn) != self._count:
            raise ConfigError(
                f"{self._where}: it returned {len(drawn)} samples for an epoch and {self._count} "
                "for another; a plan needs epochs of equal length",
                code="config.invalid_order",
            )
        return drawn

    def _draw_list(self, seed: int, epoch: int) -> Indices:
        with preserve_generators():
            reseed_all(seed)
            set_epoch = getattr(self._sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            listed = list(self._sampler)
        odd = next((entry for entry in listed if isinstance(entry, list | tuple)), None)
        if odd is not None:
            raise ConfigError(
                f"{self._where}: {type(self._sampler).__name__} yields lists, such as one of "
                f"{len(odd)} indices, expected single indices; batch_size makes the batches",
                code="config.invalid_order",
            )
        # Samplers may yield 0-d tensors or NumPy integers.
        indices = np.array([int(entry) for entry in listed], dtype=np.int64)
        if not len(indices):
            raise ConfigError(
                f"{self._where}: {type(self._sampler).__name__} yields no samples",
                code="config.invalid_order",
            )
        return indices


def to_order(found: Any, where: str) -> SampleOrder:
    """Return the result of a sampler factory as an order, with an iterable wrapped in `TorchOrder`.

    Raises:
        ConfigError: it is neither, or an unsuitable iterable; see `TorchOrder`.
    """
    if callable(found):
        order: Callable[..., Any] = found
        return order
    if isinstance(found, Iterable):
        return TorchOrder(found, where)
    raise ConfigError(
        f"{where}: it returned {type(found).__name__}, expected a function of the number of "
        "samples and a seed, or a torch sampler",
        code="config.invalid_order",
    )
