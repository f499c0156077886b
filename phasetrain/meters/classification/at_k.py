"""Precision and recall of the k highest scores."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.classification.scored import scored


class _AtK(Meter):
    """Counts the true labels among the k highest scores of each sample, for several k.

    Takes outputs `(N, C)` and classes `(N,)` or labels `(N, C)`.
    """

    better = "larger"
    first = None

    hits: Tensor
    samples: Tensor
    positives: Tensor

    def __init__(self, topk: Sequence[int] | int = 1) -> None:
        super().__init__()
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or min(self.topk) < 1 or len(set(self.topk)) < len(self.topk):
            raise ValueError(f"topk = {topk}: expected different numbers of scores of at least 1")
        self.add_sum("hits", (len(self.topk),), dtype=torch.int64)
        self.add_sum("samples", dtype=torch.int64)
        self.add_sum("positives", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the true labels of one step and those that are found."""
        found = scored("precision_at_k or recall_at_k", out)
        classes = found.scores.shape[1]
        if max(self.topk) > classes:
            raise ValueError(
                f"topk = {max(self.topk)} is more than the {classes} classes; lower topk"
            )
        best = found.scores.topk(max(self.topk), dim=1).indices
        true = best.eq(found.target[:, None]) if found.single else found.target.gather(1, best)
        counting = found.counting()
        among = (true & counting[:, None]).sum(0).cumsum(0)
        self.hits.add_(torch.stack([among[k - 1] for k in self.topk]))
        self.samples.add_(counting.sum())
        labels = counting if found.single else found.target & counting[:, None]
        self.positives.add_(labels.sum())

    def compute(self) -> dict[str, float]:
        """Return the value of each k under its number, NaN without samples."""
        possible = self._possible()
        return {str(k): float(self.hits[i].double() / possible[k]) for i, k in enumerate(self.topk)}

    @abstractmethod
    def _possible(self) -> dict[int, Tensor]:
        """Return what the hits of each k are divided by."""


@METERS.register("precision_at_k")
class PrecisionAtK(_AtK):
    """Share, in [0, 1], of the k highest scores of all samples that are true labels: hits / (k *
    samples).

    Args:
        topk: one k or several; each is a value of its own, under its number.

    Raises:
        ValueError: a k below 1; on update: other shapes, or fewer than k classes.
    """

    def _possible(self) -> dict[int, Tensor]:
        return {k: k * self.samples for k in self.topk}


@METERS.register("recall_at_k")
class RecallAtK(_AtK):
    """Share, in [0, 1], of the true labels of all samples that are among the k highest scores: hits
    / true labels.

    With one class per sample it is the top-k accuracy.

    Args:
        topk: one k or several; each is a value of its own, under its number.

    Raises:
        ValueError: a k below 1; on update: other shapes, or fewer than k classes.
    """

    def _possible(self) -> dict[int, Tensor]:
        return dict.fromkeys(self.topk, self.positives)
