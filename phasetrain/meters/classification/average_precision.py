"""Mean average precision over classes."""

from collections.abc import Sequence

from torch import Tensor

from phasetrain.meters.base import METERS
from phasetrain.meters.classification.ranking import Area, average_precision
from phasetrain.meters.classification.scores import AllScores


@METERS.register("average_precision")
class AveragePrecision(AllScores):
    """Area under precision over recall of each class, exact, and its mean over the classes that
    have a positive.

    Takes outputs `(N, C)` and labels `(N, C)` or classes `(N,)`, or one score per sample of a
    binary task. Values: `mean`, `absent` (classes without a positive in the phase, which are left
    out of the mean) and `of_NAME`.

    Args:
        area: see `ranking.average_precision`: `voc` (interpolated) or `step` (scikit-learn's and
            torchmetrics').
        per_class: give the value of each class too.
        logits: see `AllScores`.
        class_names: names of the classes; by default those of the data.

    Raises:
        ValueError: on update: other shapes.
        ConfigError: on compute: a target is none of the classes.
    """

    def __init__(
        self,
        area: Area = "voc",
        *,
        per_class: bool = False,
        logits: bool = True,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            "average_precision", per_class=per_class, logits=logits, class_names=class_names
        )
        if area not in ("voc", "step"):
            raise ValueError(f"area = {area!r}: expected 'voc' or 'step'")
        self.area = area

    def value(self, scores: Tensor, positive: Tensor) -> float:
        """Return the average precision of one class."""
        return average_precision(scores, positive, self.area)

    def is_defined(self, positive: Tensor) -> bool:
        """Tell whether the class has a positive."""
        return bool(positive.any())
