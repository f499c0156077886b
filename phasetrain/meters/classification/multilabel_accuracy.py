"""Accuracy with several labels per sample."""

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.classification.class_scores import read_scores


@METERS.register("multilabel_accuracy")
class MultilabelAccuracy(Meter):
    """Fraction of correct labels, `labels` (1 - Hamming loss), and of samples with all labels
    correct, `exact`.

    Takes outputs and labels `(N, C)`, or one score per sample of a binary task.

    Args:
        threshold: score above which a label is predicted: 0.0 for logits, 0.5 for probabilities.

    Raises:
        ValueError: on update: wrong shapes.
    """

    better = "larger"
    first = "labels"

    right: Tensor
    exact: Tensor
    decisions: Tensor
    samples: Tensor

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold
        for name in ("right", "exact", "decisions", "samples"):
            self.add_sum(name, dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the labels of one step and the correct ones."""
        found = read_scores("multilabel_accuracy", out)
        if found.is_single_label:
            raise ValueError(
                "multilabel_accuracy takes labels (N, C); for one class per sample use accuracy"
            )
        counted = found.counted_mask()
        hits = ((found.scores > self.threshold) == found.target) & counted[:, None]
        self.right.add_(hits.sum())
        self.exact.add_((hits.all(1) & counted).sum())
        self.decisions.add_(counted.sum() * hits.shape[1])
        self.samples.add_(counted.sum())

    def compute(self) -> dict[str, float]:
        """Return both fractions, in [0, 1], NaN without samples."""
        labels = self.right.double() / self.decisions
        exact = self.exact.double() / self.samples
        return {"labels": float(labels), "exact": float(exact)}
