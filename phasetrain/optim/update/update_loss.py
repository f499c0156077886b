"""The loss of an update: the sum over its micro-batches, and the mean over ranks."""

from torch import Tensor

from phasetrain.distributed import AsyncMean, Strategy
from phasetrain.distributed.strategies.base import sum_losses


class UpdateLoss:
    """Adds up the loss of an update.

    Args:
        strategy: how ranks share an update.

    Attributes:
        total: loss of the current update on this rank, 0-d, and after `collect` its mean over
            ranks; None before the first micro-batch.
        mean: mean over ranks of the last update that was collected; None if ranks share no loss.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.total: Tensor | None = None
        self.mean: Tensor | None = None
        self._strategy = strategy
        self._shares: list[Tensor] = []
        self._pending: list[AsyncMean] = []

    def add(self, loss: Tensor, *, last: bool) -> None:
        """Add the loss of a micro-batch, 0-d and weighted by its share of the update.

        Args:
            loss: the loss, without a graph.
            last: no micro-batch follows in this pass.
        """
        if self._strategy.has_global_loss:
            self._shares.append(loss)
            # Started before the last backward pass, so that the reduction over ranks overlaps with
            # it.
            if last:
                # One mean for each pass: ordered reduction adds the shards of a pass along one
                # tree.
                self._pending.append(self._strategy.mean_loss(self._shares))
                self._shares = []
        elif self.total is None:
            self.total = loss
        else:
            self.total = self.total + loss

    def collect(self) -> Tensor | None:
        """Wait for the means that were begun since the last call, and return `mean`."""
        if self._shares:  # a caller who does not say which micro-batch is the last one
            self._pending.append(self._strategy.mean_loss(self._shares))
            self._shares = []
        if self._pending:
            self.mean = sum_losses([mean.wait() for mean in self._pending])
            self.total = self.mean
            self._pending = []
        return self.mean
