"""Accuracy with several labels per sample."""

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import ClassMeter


@METERS.register("multilabel_accuracy")
class MultilabelAccuracy(ClassMeter):
    """Fraction of correct labels, `labels` (1 - Hamming loss), and of samples with all labels
    correct, `exact`.

    Takes outputs and labels `(N, C)`, or one score per sample of a binary task.

    Args:
        threshold: score above which a label is predicted: 0.0 for logits, 0.5 for probabilities.
        ignore_index: value of labels that do not count; default: the value of the loss.

    Raises:
        ValueError: on update: wrong shapes.
        ConfigError: on compute: a label is below -1.
    """

    better = "larger"
    first = "labels"

    right: Tensor
    exact: Tensor
    decisions: Tensor
    samples: Tensor

    def __init__(self, threshold: float = 0.0, ignore_index: int | None = None) -> None:
        super().__init__("multilabel_accuracy", ignore_index)
        self.threshold = threshold
        for name in ("right", "exact", "decisions", "samples"):
            self.add_sum(name, dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the labels of one step and the correct ones."""
        step_scores = self.read_scores(out)
        if step_scores.is_single_label:
            raise ValueError(
                "multilabel_accuracy takes labels (N, C); for one class per sample use accuracy"
            )
        counted = step_scores.counted_mask()
        samples = counted.any(1)
        hits = (step_scores.scores > self.threshold) == step_scores.target
        self.right.add_((hits & counted).sum())
        self.exact.add_(((hits | ~counted).all(1) & samples).sum())
        self.decisions.add_(counted.sum())
        self.samples.add_(samples.sum())

    def compute(self) -> dict[str, float]:
        """Return both fractions, in [0, 1], NaN without samples."""
        self.check_outside()
        labels = self.right.double() / self.decisions
        exact = self.exact.double() / self.samples
        return {"labels": float(labels), "exact": float(exact)}
