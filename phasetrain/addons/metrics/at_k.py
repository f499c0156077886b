"""Precision and recall at k."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import ClassMeter


class _TopKMeter(ClassMeter):
    """Counts the true labels among the k highest scores of each sample, for several k.

    Takes outputs `(N, C)` and classes `(N,)` or labels `(N, C)`. Ignored labels are not ranked.
    """

    better = "larger"
    first = None

    hits: Tensor
    samples: Tensor
    positives: Tensor

    def __init__(self, topk: Sequence[int] | int = 1, ignore_index: int | None = None) -> None:
        super().__init__("precision_at_k or recall_at_k", ignore_index)
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or min(self.topk) < 1 or len(set(self.topk)) < len(self.topk):
            raise ValueError(f"topk = {topk}: expected distinct integers of at least 1")
        self.add_sum("hits", (len(self.topk),), dtype=torch.int64)
        self.add_sum("samples", dtype=torch.int64)
        self.add_sum("positives", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the true labels of one step, and how many are among the k highest scores."""
        step_scores = self.read_scores(out)
        classes = step_scores.scores.shape[1]
        if max(self.topk) > classes:
            raise ValueError(
                f"topk = {max(self.topk)} is more than the {classes} classes; lower topk"
            )
        scores = step_scores.scores
        counted = step_scores.counted_mask()
        if not step_scores.is_single_label and step_scores.kept is not None:
            scores = scores.masked_fill(~step_scores.kept, -torch.inf)
        # One topk for the largest k, whose indices are sorted by score, serves all smaller ones.
        best = scores.topk(max(self.topk), dim=1).indices
        if step_scores.is_single_label:
            is_true = best.eq(step_scores.target[:, None]) & counted[:, None]
            labels = samples = counted
        else:
            labels = step_scores.target & counted
            is_true = labels.gather(1, best)
            samples = counted.any(1)
        # Column k - 1 of the cumulative sum has the hits among the k highest scores.
        among = is_true.sum(0).cumsum(0)
        self.hits.add_(torch.stack([among[k - 1] for k in self.topk]))
        self.samples.add_(samples.sum())
        self.positives.add_(labels.sum())

    def compute(self) -> dict[str, float]:
        """Return the value of each k, keyed by k as a string; NaN without samples."""
        self.check_outside()
        possible = self._count_possible_hits()
        return {str(k): float(self.hits[i].double() / possible[k]) for i, k in enumerate(self.topk)}

    @abstractmethod
    def _count_possible_hits(self) -> dict[int, Tensor]:
        """Return the denominator for each k."""


@METERS.register("precision_at_k")
class PrecisionAtK(_TopKMeter):
    """Fraction, in [0, 1], of the k highest scores of all samples that are true labels: hits / (k *
    samples).

    Args:
        topk: one k or several, each a metric named by k.
        ignore_index: class, or value of a label, that does not count; default: as in the loss.

    Raises:
        ValueError: a k is below 1; on update: wrong shapes, or fewer than k classes.
        ConfigError: on compute: a target is outside the classes.
    """

    def _count_possible_hits(self) -> dict[int, Tensor]:
        return {k: k * self.samples for k in self.topk}


@METERS.register("recall_at_k")
class RecallAtK(_TopKMeter):
    """Fraction, in [0, 1], of the true labels of all samples that are among the k highest scores.

    With one class per sample it equals the top-k accuracy.

    Args:
        topk: one k or several, each a metric named by k.
        ignore_index: class, or value of a label, that does not count; default: as in the loss.

    Raises:
        ValueError: a k is below 1; on update: wrong shapes, or fewer than k classes.
        ConfigError: on compute: a target is outside the classes.
    """

    def _count_possible_hits(self) -> dict[int, Tensor]:
        return dict.fromkeys(self.topk, self.positives)
