"""The mean loss of a phase."""

from typing import get_args

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Better, Meter

LOSS = "loss"
"""Name of the number that every step logs."""


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
            names = ", ".join(out.logs) or "none"
            raise ValueError(
                f"of = {self.of!r}: no such number in the logs of the step; known: {names}"
            )
        return torch.as_tensor(out.logs[self.of], device=self.total.device).detach()

    def compute(self) -> float:
        """Return the mean loss, NaN without steps."""
        # Divided at the end: a mean of the means of steps would weight a short last batch too much.
        return float(self.total / self.weight)


@METERS.register("logged")
class MeanOfLogged(MeanLoss):
    """Mean over the phase of a number that steps log, weighted like the loss; passes that do not
    log it do not count.

    A phase has the means of all logged numbers among its metrics; this meter is for monitors, which
    have to know before the first step that a metric is measured, and which values are better.

    Args:
        of: name given to `phasetrain.log`, or `loss`.
        better: which values are better, `larger` or `smaller`.

    Raises:
        ValueError: `better` is neither.
    """

    def __init__(self, of: str = LOSS, better: Better = "smaller") -> None:
        super().__init__(None if of == LOSS else of)
        if better not in get_args(Better):
            raise ValueError(f"better = {better!r}: expected larger or smaller")
        self._better = better

    def direction(self, metric: str = "") -> Better | None:
        """Return which values are better."""
        return self._better

    def update(self, out: StepOutput) -> None:
        """Add the number of one pass, if it has logged it."""
        if self.of is None or self.of in out.logs:
            super().update(out)
