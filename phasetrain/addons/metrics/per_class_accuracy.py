"""Accuracy of each class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.addons.metrics.by_class import PerClassMeter
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import average_present, label_classes


@METERS.register("per_class_accuracy")
class PerClassAccuracy(PerClassMeter):
    """Fraction of correct samples of each class, and its mean over the classes that have samples.

    Takes outputs `(N, C)` and classes `(N,)`, or one score per sample of a binary task. Metrics:
    `mean` (scikit-learn's balanced accuracy), `absent` (number of classes without a sample in the
    phase, which the mean omits) and `of_NAME`.

    Args:
        classes: number of classes; by default the number in the data.
        threshold: score above which a single score per sample predicts the second of two classes.
        class_names: names of the classes; by default the names in the data.
        ignore_index: class of targets that do not count; default: the value of the loss.

    Raises:
        ValueError: on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    better = "larger"
    first = "mean"

    correct: Tensor
    samples: Tensor

    def __init__(
        self,
        classes: int,
        threshold: float = 0.0,
        class_names: Sequence[str] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__("per_class_accuracy", classes, threshold, class_names, ignore_index)
        self.add_sum("correct", (classes,), dtype=torch.int64)
        self.add_sum("samples", (classes,), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the samples of one step and the correct ones."""
        target, predicted, counted = self.read_pairs(out)
        self.samples.index_add_(0, target, counted.long())
        self.correct.index_add_(0, target, (counted & (predicted == target)).long())

    def compute(self) -> dict[str, float]:
        """Return the mean, the number of absent classes, and the accuracy of each class."""
        self.check_outside(self.classes)
        values = self.correct.double() / self.samples
        return average_present(values, self.samples > 0) | label_classes(self.names, values)

    def table(self) -> dict[str, dict[str, float]]:
        """Return accuracy and samples of each class."""
        rows = zip(
            self.names,
            (self.correct.double() / self.samples).tolist(),
            self.samples.tolist(),
            strict=True,
        )
        return {
            name: {"accuracy": value, "samples": float(samples)} for name, value, samples in rows
        }
