"""F1 per class, over classes and over all samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.addons.metrics.by_class import PerClassMeter
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import (
    average_present,
    check_classes,
    label_classes,
)


@METERS.register("f1")
class F1(PerClassMeter):
    """F1 = 2 * right / (predicted + actual) per class, over classes (macro) and over all samples
    (micro).

    Takes outputs `(N, C)` and classes `(N,)` (the prediction is the highest score) or labels `(N,
    C)` (the predictions are all scores above the threshold), or one score per sample of a binary
    task. Metrics: `macro` (the mean over the classes that occur among targets or predictions),
    `micro`, `absent` (number of classes that do not occur) and `of_NAME`.

    Args:
        classes: number of classes; by default the number in the data.
        threshold: score above which a label is predicted: 0.0 for logits, 0.5 for probabilities.
        per_class: also return the value of each class.
        class_names: names of the classes; by default the names in the data.
        ignore_index: class, or value of a label, that does not count; default: as in the loss.

    Raises:
        ValueError: on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    better = "larger"
    first = "macro"

    right: Tensor
    predicted: Tensor
    actual: Tensor

    def __init__(
        self,
        classes: int,
        threshold: float = 0.0,
        *,
        per_class: bool = False,
        class_names: Sequence[str] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__("f1", classes, threshold, class_names, ignore_index)
        self.per_class = per_class
        for name in ("right", "predicted", "actual"):
            self.add_sum(name, (classes,), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the labels of one step, the predicted ones, and the correctly predicted ones."""
        step_scores = self.read_scores(out).as_two_classes(self.threshold)
        if step_scores.is_single_label:
            target, predicted, counted = self.make_pairs(step_scores)
            self.actual.index_add_(0, target, counted.long())
            self.predicted.index_add_(0, predicted, counted.long())
            self.right.index_add_(0, target, (counted & (predicted == target)).long())
            return
        check_classes(self.name, step_scores.scores.shape[1], self.classes)
        counted = step_scores.counted_mask()
        actual = step_scores.target & counted
        above = (step_scores.scores > self.threshold) & counted
        self.actual.add_(actual.sum(0))
        self.predicted.add_(above.sum(0))
        self.right.add_((actual & above).sum(0))

    def compute(self) -> dict[str, float]:
        """Return macro and micro F1, the number of absent classes and, if requested, the F1 of each
        class."""
        self.check_outside(self.classes)
        both = self.predicted + self.actual
        # From counts instead of precision and recall, which are 0 / 0 for a class that is never
        # predicted.
        values = 2 * self.right.double() / both
        summary = average_present(values, both > 0)
        micro = float(2 * self.right.sum().double() / both.sum())
        overall = {"macro": summary["mean"], "micro": micro, "absent": summary["absent"]}
        if self.per_class:
            return overall | label_classes(self.names, values)
        return overall

    def table(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, F1 and samples of each class."""
        right = self.right.double()
        predicted = self.predicted.double()
        actual = self.actual.double()
        values = torch.stack(
            [right / predicted, right / actual, 2 * right / (predicted + actual), actual], 1
        )
        columns = ("precision", "recall", "f1", "samples")
        rows = zip(self.names, values.tolist(), strict=True)
        return {name: dict(zip(columns, row, strict=True)) for name, row in rows}
