"""Exact areas under curves of ranked scores.

Equal scores form a single threshold, so the order of samples does not matter. Everything is
computed on the CPU in float64, in which counts are exact; a NaN score gives NaN.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Area = Literal["voc", "step"]


def _count_by_threshold(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of positives and of samples at or above each distinct score, in descending
    order."""
    order = scores.argsort(descending=True)
    ranked = scores[order]
    # A threshold cannot separate equal scores: only the last sample of a tie is a point of the
    # curve.
    last = torch.ones(len(ranked), dtype=torch.bool)
    last[:-1] = ranked[1:] != ranked[:-1]
    hits = positive[order].double().cumsum(0)[last]
    return hits, last.nonzero().flatten().double() + 1


def compute_average_precision(scores: Tensor, positive: Tensor, area: Area = "voc") -> float:
    """Return the area under the curve of precision over recall; NaN without positives.

    `step` is the sum of (recall_n - recall_n-1) * precision_n over thresholds (scikit-learn's
    `average_precision_score`); `voc` replaces precision_n by the highest precision at that recall
    or a higher one (Everingham et al., The PASCAL VOC Challenge 2012 Development Kit, section
    3.4.1).

    Args:
        scores: `(N,)`.
        positive: bool `(N,)`.
        area: which of the two.
    """
    scores = scores.cpu()
    positive = positive.cpu()
    if not bool(positive.any()) or bool(scores.isnan().any()):
        return math.nan
    hits, seen = _count_by_threshold(scores, positive)
    precision = hits / seen
    if area == "voc":
        precision = precision.flip(0).cummax(0).values.flip(0)
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * precision).sum() / hits[-1])


def compute_auroc(scores: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive scores above a negative, with ties counted as a half.

    This equals the area under the curve of true over false positives by trapezoids (Fawcett 2006,
    An introduction to ROC analysis, algorithm 3). NaN if positives or negatives are missing.

    Args:
        scores: `(N,)`.
        positive: bool `(N,)`.
    """
    scores = scores.cpu()
    positive = positive.cpu()
    if not bool(positive.any()) or bool(positive.all()) or bool(scores.isnan().any()):
        return math.nan
    hits, seen = _count_by_threshold(scores, positive)
    zero = hits.new_zeros(1)
    misses = seen - hits
    heights = (hits + torch.cat([zero, hits[:-1]])) / 2
    return float((misses.diff(prepend=zero) * heights).sum() / (hits[-1] * misses[-1]))


def compute_auroc_by_group(
    scores: Tensor, positive: Tensor, group: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the area of each group as in `compute_auroc`, and its number of samples.

    Args:
        scores: `(N,)`.
        positive: bool `(N,)`.
        group: int64 `(N,)`, the group of each sample.

    Returns:
        Areas `(G,)`, NaN for a group without positives or negatives, and samples `(G,)`, both
        float64.
    """
    scores = scores.cpu()
    _, member = torch.unique(group.cpu(), return_inverse=True)
    by_score = scores.argsort()
    # A stable sort by group of the order by score: sorted by group, then by score.
    order = by_score[member[by_score].argsort(stable=True)]
    ranked = scores[order]
    member = member[order]
    hit = positive.cpu()[order].double()
    first = torch.ones(len(ranked), dtype=torch.bool)
    first[1:] = (ranked[1:] != ranked[:-1]) | (member[1:] != member[:-1])
    tie = first.long().cumsum(0) - 1  # number of the tie: samples of a group with equal scores
    sizes = torch.bincount(tie).double()
    ranks = sizes.cumsum(0) - (sizes - 1) / 2  # mean rank within each tie, counted over all groups
    samples = torch.bincount(member).double()
    before = samples.cumsum(0) - samples
    positives = torch.bincount(member, hit, minlength=len(samples))
    rank_sums = torch.bincount(member, hit * (ranks[tie] - before[member]), minlength=len(samples))
    # The Mann-Whitney statistic of each group, divided by its number of pairs.
    pairs = positives * (samples - positives)
    areas = (rank_sums - positives * (positives + 1) / 2) / pairs
    broken = torch.bincount(member, ranked.isnan().double(), minlength=len(samples)) > 0
    return torch.where((pairs > 0) & ~broken, areas, math.nan), samples
