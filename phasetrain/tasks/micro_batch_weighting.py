"""Weights of micro-batches in an update."""

from collections.abc import Callable, Iterator

from phasetrain.data import SampleError
from phasetrain.distributed import Strategy
from phasetrain.engine.batch import Batch
from phasetrain.engine.position import Position
from phasetrain.tasks.parts import Parts


class MicroBatchWeighting:
    """Weighs micro-batches so that their gradients add up to the gradient of the whole step.

    Args:
        parts: parts of the task.
        strategy: how ranks share an update.

    Attributes:
        weight_of: returns the weight of a micro-batch; None if samples count, which needs no
            communication between ranks.
        counted: sum of the weights of the last step over all ranks, if `weight_of` is set.
        samples: samples of the last step over all ranks, if they have been counted; else None,
            and they are those of the plan.
        sums_samples: count samples over ranks, because a pass may have some of a step's
            micro-batches only.
    """

    def __init__(self, parts: Parts, strategy: Strategy) -> None:
        self.weight_of: Callable[[Batch], float] | None = None
        self.counted = 0.0
        self.samples: int | None = None
        self.sums_samples = False
        self._loaders = parts.loaders
        self._world = parts.world
        self._strategy = strategy

    def add_to(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Set the weight of each micro-batch while it is on the CPU."""
        for batches in steps:
            self._set_weights(batches)
            yield batches

    def total(self, batches: list[Batch], at: Position) -> float:
        """Return the divisor that turns the weights of micro-batches into shares of the update.

        Raises:
            SampleError: nothing of the step counts on any rank.
        """
        if self.weight_of is not None:
            total = self._sum_weights(batches, at)
        else:
            own = sum([batch.size for batch in batches])
            self.samples = None
            # Alone, own samples are all samples; `at.samples` is 0 outside of a plan.
            if own and (self._world.is_single_process or not at.samples):
                self.samples = own
                return own
            total = self._sum_samples(own, at)
        if self._strategy.averages_gradients:
            # Averaging divides by the world size once more.
            return total / self._world.size
        return total

    def _sum_weights(self, batches: list[Batch], at: Position) -> float:
        self._set_weights(batches)
        # Every rank divides by the same total, so the update equals the one of a single large
        # batch. The mean of the ranks' means would not, if they count different numbers of tokens.
        self.counted = self._world.all_reduce_sum(sum(batch.weight or 0 for batch in batches))
        if not self.counted:
            raise SampleError(
                f"DATA.{at.split.upper()}: nothing in step {at.step + 1} of the pass counts in the "
                "loss, for example because all of its targets are ignored; use larger batches, or "
                "fix the data",
                code="data.empty_step",
            )
        return self.counted

    def _sum_samples(self, own: int, at: Position) -> float:
        total: float = at.samples
        loader = self._loaders.get(at.split)
        # Dropped or excluded samples leave a step with fewer samples than the plan knows.
        may_lack = loader is not None and loader.may_lack_samples
        if may_lack or self.sums_samples:
            total = self._world.all_reduce_sum(own)
        if may_lack:
            self.samples = int(total)
        if not total:
            raise SampleError(
                f"DATA.{at.split.upper()}.on_bad_sample = 'drop' leaves no sample of a step on any "
                "rank, because none of them can be read; fix the data, use larger batches, or set "
                "it to substitute",
                code="data.empty_step",
            )
        return total

    def _set_weights(self, batches: list[Batch]) -> None:
        assert self.weight_of is not None
        for batch in batches:
            # `add_to` has done it for batches from a loader; a custom loop may pass its own
            # batches.
            if batch.weight is None:
                batch.weight = self.weight_of(batch)
