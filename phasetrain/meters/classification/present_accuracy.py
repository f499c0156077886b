"""Accuracy among the classes that a phase has."""

import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.classification.scored import only_single, scored
from phasetrain.meters.classification.scores import check_targets


@METERS.register("present_accuracy")
class PresentAccuracy(Meter):
    """Top-k accuracy where only classes that are among the targets of the phase can be chosen.

    For a test on some of the classes that a model knows (VISSL: METERS.model_output_mask). Takes
    outputs `(N, C)` and classes `(N,)`. Which classes there are is known at the end of the phase,
    over all processes, so all scores are kept: `4 * C + 8` bytes per sample. Values: `accuracy`, in
    [0, 1], and `absent`, the classes that could not be chosen.

    Args:
        topk: number of scores that may hold the class.

    Raises:
        ValueError: a topk below 1; on update: other shapes.
        ConfigError: on compute: a target is none of the classes, or fewer than topk classes are
            present.
    """

    better = "larger"
    first = "accuracy"

    scores: torch.Tensor
    target: torch.Tensor

    def __init__(self, topk: int = 1) -> None:
        super().__init__()
        if topk < 1:
            raise ValueError(f"topk = {topk}: expected a number of scores of at least 1")
        self.topk = topk
        self.add_rows("scores")
        self.add_rows("target", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Keep scores and classes of one step."""
        found = only_single("present_accuracy", scored("present_accuracy", out))
        self.keep("scores", found.scores, found.mask)
        self.keep("target", found.target, found.mask)

    def compute(self) -> dict[str, float]:
        """Return the accuracy among present classes, NaN without samples."""
        if not len(self.scores):
            return {"accuracy": float("nan"), "absent": float("nan")}
        classes = self.scores.shape[1]
        check_targets(
            "present_accuracy", int(((self.target < 0) | (self.target >= classes)).sum()), classes
        )
        present = torch.unique(self.target)
        if self.topk > len(present):
            raise ConfigError(
                f"present_accuracy: topk = {self.topk} is more than the {len(present)} classes present"
            )
        best = present[self.scores[:, present].topk(self.topk, dim=1).indices]
        hits = best.eq(self.target[:, None]).any(1)
        return {"accuracy": float(hits.double().mean()), "absent": float(classes - len(present))}
