"""Top-k accuracy."""

import torch
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import ClassMeter, find_outside


@METERS.register("accuracy")
class Accuracy(ClassMeter):
    """Fraction of targets, in [0, 1], whose class is among the `topk` highest scores.

    Takes outputs `(N, C, ...)` and integer targets `(N, ...)`, as cross entropy does.

    Args:
        topk: number of scores that may contain the class.
        ignore_index: class of targets that do not count; default: the value of the loss.

    Raises:
        ValueError: topk is below 1; on update: wrong shapes, non-integer targets, or fewer than
            topk classes.
        ConfigError: on compute: a target is outside the classes.
    """

    better = "larger"

    correct: Tensor
    samples: Tensor

    def __init__(self, topk: int = 1, ignore_index: int | None = None) -> None:
        super().__init__("accuracy", ignore_index)
        check_at_least(1, topk=topk)
        self.topk = topk
        self.add_sum("correct", dtype=torch.int64)
        self.add_sum("samples", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the samples of one step and the correct ones."""
        output = out.output
        self._check_shapes(output, out.target)
        target = out.target.long()  # in uint8, -100 would be 156
        counted = self.find_counted(target, out.mask)
        # argmax is several times faster than topk(1).
        if self.topk == 1:
            hits = output.argmax(1).eq(target)
        else:
            hits = output.topk(self.topk, dim=1).indices.eq(target[:, None]).any(1)
        outside = find_outside(target, output.shape[1])
        # Together, because each kernel takes longer to start than to run. Exact counts in int64:
        # sums over steps and ranks are the same in any order.
        found = torch.stack([counted, hits, outside]) & counted
        sums = found.flatten(1).sum(1).unbind()
        torch._foreach_add_([self.samples, self.correct, self.outside], sums)

    def compute(self) -> float:
        """Return the accuracy, NaN without samples."""
        self.check_outside()
        return float(self.correct.double() / self.samples)

    def _check_shapes(self, output: Tensor, target: Tensor) -> None:
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                f"accuracy takes tensors of scores and classes, not {type(output).__name__} and "
                f"{type(target).__name__}"
            )
        if output.ndim < 2 or output[:, 0].shape != target.shape:
            raise ValueError(
                "accuracy takes scores (N, C, ...) and classes (N, ...), not outputs "
                f"{tuple(output.shape)} and targets {tuple(target.shape)}"
            )
        if target.is_floating_point():
            raise ValueError(f"accuracy takes integer targets, not {target.dtype}")
        if output.shape[1] == 1:
            raise ValueError(
                "accuracy takes a score for each class, and the outputs (N, 1) have one, so the "
                "prediction is always class 0; for one score of a binary label use "
                "multilabel_accuracy"
            )
        if self.topk > output.shape[1]:
            raise ValueError(
                f"accuracy: topk = {self.topk} is more than the {output.shape[1]} classes; lower "
                "topk"
            )
