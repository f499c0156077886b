"""Which classes are taken for which."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.classification.by_class import ByClass
from phasetrain.meters.classification.scored import per_class

Normalize = Literal["none", "targets", "predictions", "all"]


@METERS.register("confusion_matrix")
class ConfusionMatrix(ByClass):
    """How many samples of each class were taken for which; the class with the highest score is the
    prediction.

    Takes outputs `(N, C)` and classes `(N,)`, or one score per sample of a binary task. The values
    are those of the diagonal, `of_NAME`; `table()` has the whole matrix, a row for each true class,
    a column for each predicted one.

    Args:
        classes: number of classes; by default that of the data.
        normalize: `none` counts samples; `targets` divides each row by its sum (the diagonal is the
            recall), `predictions` each column by its own (the precision), `all` everything by the
            samples.
        threshold: the score above which one score per sample says the second of two classes.
        class_names: names of the classes; by default those of the data.

    Raises:
        ValueError: on update: other shapes.
        ConfigError: on compute: a target is none of the classes.
    """

    first = None

    counts: Tensor

    def __init__(
        self,
        classes: int,
        normalize: Normalize = "none",
        threshold: float = 0.0,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__("confusion_matrix", classes, threshold, class_names)
        if normalize not in ("none", "targets", "predictions", "all"):
            raise ValueError(
                f"normalize = {normalize!r}: expected 'none', 'targets', 'predictions' or 'all'"
            )
        self.normalize = normalize
        self.add_sum("counts", (classes, classes), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the samples of one step."""
        target, predicted, counting = self.pairs(out)
        self.counts.view(-1).index_add_(0, target * self.classes + predicted, counting.long())

    def matrix(self) -> Tensor:
        """Return the matrix, float64 `(C, C)`, normalised as asked for; NaN where nothing was
        counted."""
        self.check()
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
        return per_class(self.names, self.matrix().diagonal())

    def table(self) -> dict[str, dict[str, float]]:
        """Return the matrix: true class -> predicted class -> value."""
        rows = zip(self.names, self.matrix().tolist(), strict=True)
        return {name: dict(zip(self.names, row, strict=True)) for name, row in rows}
