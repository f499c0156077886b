"""Top-k accuracy."""

import torch
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Meter


@METERS.register("accuracy")
class Accuracy(Meter):
    """Fraction of samples, in [0, 1], whose class is among the `topk` highest scores.

    Takes outputs `(N, C)` and integer targets `(N,)`.

    Args:
        topk: number of scores that may contain the class.

    Raises:
        ValueError: topk is below 1; on update: wrong shapes, non-integer targets, or fewer than
            topk classes.
    """

    better = "larger"

    correct: Tensor
    samples: Tensor

    def __init__(self, topk: int = 1) -> None:
        super().__init__()
        check_at_least(1, topk=topk)
        self.topk = topk
        self.add_sum("correct", dtype=torch.int64)
        self.add_sum("samples", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the samples of one step and the correct ones."""
        output = out.output
        target = out.target
        mask = out.mask
        self._check_shapes(output, target)
        # argmax is several times faster than topk(1).
        if self.topk == 1:
            hits = output.argmax(1).eq(target)
        else:
            hits = output.topk(self.topk, dim=1).indices.eq(target[:, None]).any(1)
        if mask is None:
            self.samples.add_(len(hits))
        else:
            hits = hits & mask
            self.samples.add_(mask.sum())
        # Exact counts in int64: sums over steps and ranks are the same in any order.
        self.correct.add_(hits.sum())

    def compute(self) -> float:
        """Return the accuracy, NaN without samples."""
        return float(self.correct.double() / self.samples)

    def _check_shapes(self, output: Tensor, target: Tensor) -> None:
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                f"accuracy takes tensors of scores and classes, not {type(output).__name__} and "
                f"{type(target).__name__}"
            )
        if output.ndim != 2 or target.ndim != 1 or len(output) != len(target):
            raise ValueError(
                "accuracy takes scores (N, C) and classes (N,), not outputs "
                f"{tuple(output.shape)} and targets {tuple(target.shape)}"
            )
        if target.is_floating_point():
            raise ValueError(f"accuracy takes integer targets, not {target.dtype}")
        if self.topk > output.shape[1]:
            raise ValueError(
                f"accuracy: topk = {self.topk} is more than the {output.shape[1]} classes; lower "
                "topk"
            )
