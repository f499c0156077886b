"""Mean average precision over classes."""

from collections.abc import Sequence

from torch import Tensor

from phasetrain.addons.metrics.all_scores import RankingMeter
from phasetrain.addons.metrics.ranking import Area, compute_average_precision
from phasetrain.meters.base import METERS


@METERS.register("average_precision")
class AveragePrecision(RankingMeter):
    """Exact area under precision over recall of each class, and its mean over the classes with a
    positive.

    Takes outputs `(N, C)` and labels `(N, C)` or classes `(N,)`, or one score per sample of a
    binary task. Metrics: `mean`, `absent` (number of classes without a positive in the phase, which
    the mean omits) and `of_NAME`.

    Args:
        area: `voc` (interpolated) or `step` (scikit-learn and torchmetrics), see
            `ranking.compute_average_precision`.
        per_class: also return the value of each class.
        logits: see `RankingMeter`.
        class_names: names of the classes; by default the names in the data.
        ignore_index: class, or value of a label, that does not count; default: as in the loss.

    Raises:
        ValueError: on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    def __init__(
        self,
        area: Area = "voc",
        *,
        per_class: bool = False,
        logits: bool = True,
        class_names: Sequence[str] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(
            "average_precision",
            per_class=per_class,
            logits=logits,
            class_names=class_names,
            ignore_index=ignore_index,
        )
        if area not in ("voc", "step"):
            raise ValueError(f"area = {area!r}: expected 'voc' or 'step'")
        self.area = area

    def compute_class(self, scores: Tensor, positive: Tensor) -> float:
        """Return the average precision of one class."""
        return compute_average_precision(scores, positive, self.area)

    def is_defined(self, positive: Tensor) -> bool:
        """Return whether the class has a positive."""
        return bool(positive.any())
