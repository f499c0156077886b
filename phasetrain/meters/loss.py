"""The mean loss of a phase."""

from torch import Tensor

from phasetrain.batch import StepOutput
from phasetrain.meters.base import METERS, Meter


@METERS.register("loss")
class MeanLoss(Meter):
    """Mean loss over the phase, each step weighted by what its own mean counts (samples or tokens)."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("total")
        self.add_sum("weight")

    def update(self, out: StepOutput) -> None:
        """Add the loss of one step; a step of weight 0 has a mean over nothing, NaN, and is left out."""
        if out.weight:
            self.total.add_(out.loss.detach(), alpha=out.weight)
            self.weight.add_(out.weight)

    def compute(self) -> float:
        """Return the mean loss, NaN without steps."""
        return float(self.total / self.weight)
