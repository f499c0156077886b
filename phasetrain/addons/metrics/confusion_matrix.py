"""Which classes are predicted for which."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from phasetrain.addons.metrics.by_class import PerClassMeter
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import label_classes

Normalize = Literal["none", "targets", "predictions", "all"]


@METERS.register("confusion_matrix")
class ConfusionMatrix(PerClassMeter):
    """How often each class is predicted for each true class; the prediction is the highest score.

    Takes outputs `(N, C)` and classes `(N,)`, or one score per sample of a binary task. The metrics
    are the diagonal, `of_NAME`; `table()` has the whole matrix, a row for each true class, a column
    for each predicted one.

    Args:
        classes: number of classes; by default the number in the data.
        normalize: `none` counts samples; `targets` divides each row by its sum (the diagonal is the
            recall), `predictions` each column by its sum (the precision), `all` everything by the
            number of samples.
        threshold: score above which a single score per sample predicts the second of two classes.
        class_names: names of the classes; by default the names in the data.
        ignore_index: class of targets that do not count; default: the value of the loss.

    Raises:
        ValueError: on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    better = "larger"
    first = None

    counts: Tensor

    def __init__(
        self,
        classes: int,
        normalize: Normalize = "none",
        threshold: float = 0.0,
        class_names: Sequence[str] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__("confusion_matrix", classes, threshold, class_names, ignore_index)
        if normalize not in ("none", "targets", "predictions", "all"):
            raise ValueError(
                f"normalize = {normalize!r}: expected 'none', 'targets', 'predictions' or 'all'"
            )
        self.normalize = normalize
        self.add_sum("counts", (classes, classes), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the samples of one step."""
        target, predicted, counted = self.read_pairs(out)
        # Pair (i, j) as one number: bincount, or selecting rows by the mask, would wait for the
        # device; padding adds 0.
        self.counts.view(-1).index_add_(0, target * self.classes + predicted, counted.long())

    def compute_matrix(self) -> Tensor:
        """Return the normalised matrix, float64 `(C, C)`; NaN if nothing was counted."""
        self.check_outside(self.classes)
        counts = self.counts.double()
        total = counts.sum()
        by = {
            "none": (total > 0).double(),
            "targets": counts.sum(1, keepdim=True),
            "predictions": counts.sum(0, keepdim=True),
            "all": total,
        }
        return counts / by[self.normalize]

    def compute(self) -> dict[str, float]:
        """Return the diagonal by class."""
        return label_classes(self.names, self.compute_matrix().diagonal())

    def table(self) -> dict[str, dict[str, float]]:
        """Return the matrix: true class -> predicted class -> value."""
        rows = zip(self.names, self.compute_matrix().tolist(), strict=True)
        return {name: dict(zip(self.names, row, strict=True)) for name, row in rows}
