"""Accuracy of each class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.classification.by_class import ByClass
from phasetrain.meters.classification.scored import mean_of_present, per_class


@METERS.register("per_class_accuracy")
class PerClassAccuracy(ByClass):
    """Share of the samples of each class that are right, and its mean over the classes that have
    samples.

    Takes outputs `(N, C)` and classes `(N,)`, or one score per sample of a binary task. Values:
    `mean` (scikit-learn's balanced accuracy), `absent` (classes without a sample in the phase,
    which are left out of the mean) and `of_NAME`.

    Args:
        classes: number of classes; by default that of the data.
        threshold: the score above which one score per sample says the second of two classes.
        class_names: names of the classes; by default those of the data.

    Raises:
        ValueError: on update: other shapes.
        ConfigError: on compute: a target is none of the classes.
    """

    better = "larger"
    first = "mean"

    correct: Tensor
    samples: Tensor

    def __init__(
        self, classes: int, threshold: float = 0.0, class_names: Sequence[str] | None = None
    ) -> None:
        super().__init__("per_class_accuracy", classes, threshold, class_names)
        self.add_sum("correct", (classes,), dtype=torch.int64)
        self.add_sum("samples", (classes,), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the samples of one step and those that are right."""
        target, predicted, counting = self.pairs(out)
        self.samples.index_add_(0, target, counting.long())
        self.correct.index_add_(0, target, (counting & (predicted == target)).long())

    def compute(self) -> dict[str, float]:
        """Return the mean, the number of absent classes, and the accuracy of each class."""
        self.check()
        values = self.correct.double() / self.samples
        return mean_of_present(values, self.samples > 0) | per_class(self.names, values)

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
