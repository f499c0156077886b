"""What meters have in common that count by class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import Meter
from phasetrain.meters.classification.scored import check_classes, class_labels, only_single, scored
from phasetrain.meters.classification.scores import check_targets


class ByClass(Meter):
    """Counts by class, of samples whose target is one of the classes; what is not is counted, and
    refused at the end.

    Args:
        name: for messages.
        classes: number of classes.
        threshold: the score above which one score per sample says the second of two classes.
        class_names: names of the classes.
    """

    outside: Tensor

    def __init__(
        self, name: str, classes: int, threshold: float, class_names: Sequence[str] | None
    ) -> None:
        super().__init__()
        if classes < 1:
            raise ValueError(f"classes = {classes}: expected at least 1")
        self.name = name
        self.classes = classes
        self.threshold = threshold
        self.names = class_labels(classes, class_names)
        self.add_sum("outside", dtype=torch.int64)

    def pairs(self, out: StepOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Return target, prediction and whether the sample counts, `(N,)` each; counts targets
        outside the classes."""
        found = only_single(self.name, scored(self.name, out).classes(self.threshold))
        check_classes(self.name, found.scores.shape[1], self.classes)
        target = found.target
        counting = found.counting()
        inside = (target >= 0) & (target < self.classes)
        self.outside.add_((counting & ~inside).sum())
        return target.clamp(0, self.classes - 1), found.scores.argmax(1), counting & inside

    def check(self) -> None:
        """Refuse a phase with targets outside the classes.

        Raises:
            ConfigError: there are some.
        """
        check_targets(self.name, int(self.outside), self.classes)
