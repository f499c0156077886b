"""The mean loss of a phase."""

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Meter


@METERS.register("loss")
class MeanLoss(Meter):
    """Mean loss over the phase; each step is weighted by the denominator of its mean (samples or
    tokens).

    Args:
        of: name of a number in the logs of the step to average instead of the loss, such as
            `loss_LABEL` of a loss with several terms.

    Raises:
        ValueError: on update: there is no such number.
    """

    better = "smaller"
    needs_target = False

    total: Tensor
    weight: Tensor

    def __init__(self, of: str | None = None) -> None:
        super().__init__()
        self.of = of
        self.add_sum("total")
        self.add_sum("weight")

    def update(self, out: StepOutput) -> None:
        """Add the loss of one step."""
        # A step of weight 0 has a mean over nothing, NaN.
        if out.weight:
            # Sums in float64: the mean of a long phase then does not depend on the batch or world
            # size in the digits that are reported.
            self.total.add_(self._read_value(out), alpha=out.weight)
            self.weight.add_(out.weight)

    def _read_value(self, out: StepOutput) -> Tensor:
        if self.of is None:
            return out.loss.detach()
        if self.of not in out.logs:
            known = ", ".join(out.logs) or "none"
            raise ValueError(
                f"of = {self.of!r}: no such number in the logs of the step; known: {known}"
            )
        return torch.as_tensor(out.logs[self.of], device=self.total.device).detach()

    def compute(self) -> float:
        """Return the mean loss, NaN without steps."""
        # Divided at the end: a mean of the means of steps would weight a short last batch too much.
        return float(self.total / self.weight)
