"""Accuracy among the classes present in a phase."""

import torch

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import ClassMeter, require_single_label


@METERS.register("present_accuracy")
class PresentAccuracy(ClassMeter):
    """Top-k accuracy if only classes among the targets of the phase can be predicted.

    For a test on some of the classes that a model knows (VISSL: METERS.model_output_mask). Takes
    outputs `(N, C)` and classes `(N,)`. Metrics: `accuracy`, in [0, 1], and `absent`, the number of
    classes that could not be predicted. Keeps `4 * C + 8` bytes per sample, because the classes
    present over all ranks are known only at the end of the phase.

    Args:
        topk: number of scores that may contain the class.
        ignore_index: class of targets that do not count; default: the value of the loss.

    Raises:
        ValueError: topk is below 1; on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes, or fewer than topk classes are
            present.
    """

    better = "larger"
    first = "accuracy"

    scores: torch.Tensor
    target: torch.Tensor

    def __init__(self, topk: int = 1, ignore_index: int | None = None) -> None:
        super().__init__("present_accuracy", ignore_index)
        check_at_least(1, topk=topk)
        self.topk = topk
        self.add_rows("scores")
        self.add_rows("target", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Append scores and classes of one step."""
        step_scores = require_single_label(self.name, self.read_scores(out))
        # All targets are kept: selecting those that are not ignored would wait for the device.
        self.append_rows("scores", step_scores.scores, step_scores.mask)
        self.append_rows("target", step_scores.target, step_scores.mask)

    @property
    def is_empty(self) -> bool:
        """Whether no target counts."""
        return not bool(self.find_counted(self.target).any())

    def compute(self) -> dict[str, float]:
        """Return the accuracy among present classes, NaN without samples."""
        counted = self.find_counted(self.target)
        scores = self.scores[counted]
        target = self.target[counted]
        if not len(scores):
            return {"accuracy": float("nan"), "absent": float("nan")}
        classes = scores.shape[1]
        self.check_outside(classes)
        present = torch.unique(target)
        if self.topk > len(present):
            raise ConfigError(
                f"present_accuracy: topk = {self.topk} is more than the {len(present)} classes "
                "present",
                code="config.conflict",
            )
        best = present[scores[:, present].topk(self.topk, dim=1).indices]
        hits = best.eq(target[:, None]).any(1)
        return {"accuracy": float(hits.double().mean()), "absent": float(classes - len(present))}
