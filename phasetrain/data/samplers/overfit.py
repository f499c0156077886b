"""Learning a few batches by heart: whether a model and its loss can learn at all
(PHASES.overfit)."""

from phasetrain.data.samplers.phase_sampler import Order, Pass, pass_length


class Overfit:
    """An order whose passes are all the beginning of the same pass of another order.

    Args:
        order: the other one.
        samples: how many samples.
        seed: of the pass whose beginning it is.
    """

    def __init__(self, order: Order, samples: int, seed: int) -> None:
        self._order = order
        self._samples = samples
        self._seed = seed

    def samples(self, length: int) -> int:
        """Return the number of samples of a pass."""
        return min(self._samples, pass_length(self._order, length))

    def __call__(self, length: int, seed: int) -> Pass:
        """Return the same indices whatever the seed, int64."""
        return self._order(length, self._seed)[: self.samples(length)]
