"""Base class of meters that count per class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import Meter
from phasetrain.meters.classification.all_scores import check_targets
from phasetrain.meters.classification.class_scores import (
    check_classes,
    make_class_labels,
    read_scores,
    require_single_label,
)


class PerClassMeter(Meter):
    """Counts per class; targets outside the classes are counted separately and rejected at the end.

    Args:
        name: name of the meter, for messages.
        classes: number of classes.
        threshold: score above which a single score per sample predicts the second of two classes.
        class_names: names of the classes.
    """

    outside: Tensor

    def __init__(
        self, name: str, classes: int, threshold: float, class_names: Sequence[str] | None
    ) -> None:
        super().__init__()
        check_at_least(1, classes=classes)
        self.name = name
        self.classes = classes
        self.threshold = threshold
        self.names = make_class_labels(classes, class_names)
        self.add_sum("outside", dtype=torch.int64)

    def read_pairs(self, out: StepOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Return target, prediction and whether the sample counts, `(N,)` each."""
        found = require_single_label(
            self.name, read_scores(self.name, out).as_two_classes(self.threshold)
        )
        check_classes(self.name, found.scores.shape[1], self.classes)
        target = found.target
        counted = found.counted_mask()
        # Raising here would wait for the device in every step; `check_outside` raises at the end.
        inside = (target >= 0) & (target < self.classes)
        self.outside.add_((counted & ~inside).sum())
        # Clamped, because an index outside would fail as an assertion of the device; it is not
        # counted.
        return target.clamp(0, self.classes - 1), found.scores.argmax(1), counted & inside

    def check_outside(self) -> None:
        """Reject a phase with targets outside the classes.

        Raises:
            ConfigError: there are some.
        """
        check_targets(self.name, int(self.outside), self.classes)
