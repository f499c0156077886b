"""F1 of each class, over classes and over all samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.classification.by_class import ByClass
from phasetrain.meters.classification.scored import (
    check_classes,
    mean_of_present,
    per_class,
    scored,
)


@METERS.register("f1")
class F1(ByClass):
    """F1 = 2 * right / (predicted + actual) of each class, over the classes (macro) and over all
    samples (micro).

    Takes outputs `(N, C)` and classes `(N,)` (the highest score is the prediction) or labels
    `(N, C)` (all scores above the threshold are), or one score per sample of a binary task. Values:
    `macro` (the mean over the classes that occur among targets or predictions), `micro`, `absent`
    (classes that do not occur) and `of_NAME`.

    Args:
        classes: number of classes; by default that of the data.
        threshold: the score above which a label is predicted: 0.0 for logits, 0.5 for
            probabilities.
        per_class: give the value of each class too.
        class_names: names of the classes; by default those of the data.

    Raises:
        ValueError: on update: other shapes.
        ConfigError: on compute: a target is none of the classes.
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
    ) -> None:
        super().__init__("f1", classes, threshold, class_names)
        self.per_class = per_class
        for name in ("right", "predicted", "actual"):
            self.add_sum(name, (classes,), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the labels of one step, those predicted and those that are both."""
        found = scored(self.name, out).classes(self.threshold)
        if found.single:
            target, predicted, counting = self.pairs(out)
            self.actual.index_add_(0, target, counting.long())
            self.predicted.index_add_(0, predicted, counting.long())
            self.right.index_add_(0, target, (counting & (predicted == target)).long())
            return
        check_classes(self.name, found.scores.shape[1], self.classes)
        counting = found.counting()[:, None]
        actual = found.target & counting
        above = (found.scores > self.threshold) & counting
        self.actual.add_(actual.sum(0))
        self.predicted.add_(above.sum(0))
        self.right.add_((actual & above).sum(0))

    def compute(self) -> dict[str, float]:
        """Return macro and micro F1, the number of absent classes and, if asked for, the F1 of each
        class."""
        self.check()
        both = self.predicted + self.actual
        values = 2 * self.right.double() / both
        found = mean_of_present(values, both > 0)
        micro = float(2 * self.right.sum().double() / both.sum())
        classes = per_class(self.names, values) if self.per_class else {}
        return {"macro": found["mean"], "micro": micro, "absent": found["absent"]} | classes

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
