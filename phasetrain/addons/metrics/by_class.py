"""Base class of meters that count per class."""

from collections.abc import Sequence

from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.class_scores import (
    ClassMeter,
    ClassScores,
    check_classes,
    make_class_labels,
    require_single_label,
)


class PerClassMeter(ClassMeter):
    """Counts per class.

    Args:
        name: name of the meter, for messages.
        classes: number of classes.
        threshold: score above which a single score per sample predicts the second of two classes.
        class_names: names of the classes.
        ignore_index: see `ClassMeter`.
    """

    def __init__(
        self,
        name: str,
        classes: int,
        threshold: float,
        class_names: Sequence[str] | None,
        ignore_index: int | None,
    ) -> None:
        super().__init__(name, ignore_index)
        check_at_least(1, classes=classes)
        self.classes = classes
        self.threshold = threshold
        self.names = make_class_labels(classes, class_names)

    def read_pairs(self, out: StepOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Return target, prediction and whether the sample counts, `(N,)` each."""
        return self.make_pairs(self.read_scores(out).as_two_classes(self.threshold))

    def make_pairs(self, scores: ClassScores) -> tuple[Tensor, Tensor, Tensor]:
        """Return target, prediction and whether the sample counts, `(N,)` each."""
        require_single_label(self.name, scores)
        check_classes(self.name, scores.scores.shape[1], self.classes)
        counted = scores.counted_mask() & ~scores.invalid
        # Clamped, because an index outside would fail as an assertion of the device; it is not
        # counted.
        return scores.target.clamp(0, self.classes - 1), scores.scores.argmax(1), counted
