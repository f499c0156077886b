"""Overfit a few batches: checks whether a model and its loss can learn at all (PHASES.overfit)."""

from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.phase_sampler import SampleOrder, draw_pass, pass_length


class OverfitOrder:
    """An order whose epochs are all the beginning of the same epoch of another order.

    Args:
        order: the other order.
        samples: number of samples.
        seed: seed of the epoch.
    """

    def __init__(self, order: SampleOrder, samples: int, seed: int) -> None:
        self._order = order
        self._samples = samples
        self._seed = seed

    def samples(self, length: int) -> int:
        """Return the number of samples per epoch."""
        return min(self._samples, pass_length(self._order, length))

    def __call__(self, length: int, seed: int) -> EpochOrder:
        """Return the same indices for every seed, int64."""
        return draw_pass(self._order, length, self._seed, 0)[: self.samples(length)]
