"""Orders whose epochs have a number of draws, instead of each sample once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasetrain.config.checks import check_at_least
from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.permutation import ChunkedPass, Indices

Draws = Callable[[int, int], Indices]
"""Returns the indices of the draws in [begin, end)."""


class DrawOrder:
    """An order of `samples` draws per epoch.

    Args:
        make_draws: returns the draws of an epoch for the length of the dataset and the seed of the
            epoch.
        samples: draws per epoch; None: the length of the dataset times `times`.
        times: factor for `samples=None`.
    """

    def __init__(
        self, make_draws: Callable[[int, int], Draws], samples: int | None = None, times: int = 1
    ) -> None:
        check_at_least(1, samples=samples)
        self._make_draws = make_draws
        self._samples = samples
        self._times = times

    def samples(self, length: int) -> int:
        """Return the number of draws per epoch."""
        if self._samples is None:
            return self._times * length
        return self._samples

    def __call__(self, length: int, seed: int) -> EpochOrder:
        """Return the indices of one epoch, computed on access."""
        return ChunkedPass(self.samples(length), self._make_draws(length, seed))


def read_numbers(file: str) -> NDArray[Any]:
    """Return the array in a file: `.npy`, or text with a number per line.

    Raises:
        ValueError: it contains something else.
        OSError: it cannot be read.
    """
    if Path(file).suffix == ".npy":
        # Without pickle, because a pickled array could execute code.
        array: NDArray[Any] = np.load(file, allow_pickle=False)
        return array
    return np.loadtxt(file, ndmin=1)
