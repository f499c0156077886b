"""Exact areas under curves of ranked scores; equal scores are one threshold, so the order of
samples does not matter.

All are computed on the CPU in float64, where counts are exact; a score that is not a number gives
NaN.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Area = Literal["voc", "step"]


def _counts(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each distinct score from the highest down, the positives and all samples at or
    above it."""
    order = scores.argsort(descending=True)
    ranked = scores[order]
    last = torch.ones(len(ranked), dtype=torch.bool)
    last[:-1] = ranked[1:] != ranked[:-1]
    hits = positive[order].double().cumsum(0)[last]
    return hits, last.nonzero().flatten().double() + 1


def average_precision(scores: Tensor, positive: Tensor, area: Area = "voc") -> float:
    """Return the area under the curve of precision over recall; NaN without positives.

    With `step` the sum of (recall_n - recall_n-1) * precision_n over thresholds (scikit-learn's
    `average_precision_score`); with `voc` precision_n is replaced by the highest precision at that
    recall or a higher one (Everingham et al., The PASCAL VOC Challenge 2012 Development Kit,
    section 3.4.1).

    Args:
        scores: `(N,)`.
        positive: bool `(N,)`.
        area: which of the two.
    """
    scores, positive = scores.cpu(), positive.cpu()
    if not bool(positive.any()) or bool(scores.isnan().any()):
        return math.nan
    hits, seen = _counts(scores, positive)
    precision = hits / seen
    if area == "voc":
        precision = precision.flip(0).cummax(0).values.flip(0)
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * precision).sum() / hits[-1])


def area_under_roc(scores: Tensor, positive: Tensor) -> float:
    """Return the chance that a positive's score is above a negative's, equal scores counting a
    half.

    That is the area under the curve of true over false positives by trapezoids (Fawcett 2006, An
    introduction to ROC analysis, algorithm 3). NaN where one of the two is missing.

    Args:
        scores: `(N,)`.
        positive: bool `(N,)`.
    """
    scores, positive = scores.cpu(), positive.cpu()
    if not bool(positive.any()) or bool(positive.all()) or bool(scores.isnan().any()):
        return math.nan
    hits, seen = _counts(scores, positive)
    zero = hits.new_zeros(1)
    misses = seen - hits
    heights = (hits + torch.cat([zero, hits[:-1]])) / 2
    return float((misses.diff(prepend=zero) * heights).sum() / (hits[-1] * misses[-1]))


def areas_under_roc_by_group(
    scores: Tensor, positive: Tensor, group: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the area of each group as in `area_under_roc`, and its number of samples.

    Args:
        scores: `(N,)`.
        positive: bool `(N,)`.
        group: int64 `(N,)`, the group of each sample.

    Returns:
        Areas `(G,)`, NaN for a group in which positives or negatives are missing, and samples
        `(G,)`, float64 both.
    """
    scores, positive, group = scores.cpu(), positive.cpu(), group.cpu()
    _, member = torch.unique(group, return_inverse=True)
    by_score = scores.argsort()
    order = by_score[member[by_score].argsort(stable=True)]  # by group, and by score within one
    ranked, member, hit = scores[order], member[order], positive[order].double()
    first = torch.ones(len(ranked), dtype=torch.bool)
    first[1:] = (ranked[1:] != ranked[:-1]) | (member[1:] != member[:-1])
    tie = first.long().cumsum(0) - 1  # samples of a group with the same score
    sizes = torch.bincount(tie).double()
    ranks = sizes.cumsum(0) - (sizes - 1) / 2  # mean rank of each tie, counted over all groups
    samples = torch.bincount(member).double()
    before = samples.cumsum(0) - samples
    positives = torch.bincount(member, hit, minlength=len(samples))
    rank_sums = torch.bincount(member, hit * (ranks[tie] - before[member]), minlength=len(samples))
    pairs = positives * (samples - positives)
    areas = (rank_sums - positives * (positives + 1) / 2) / pairs
    broken = torch.bincount(member, ranked.isnan().double(), minlength=len(samples)) > 0
    return torch.where((pairs > 0) & ~broken, areas, math.nan), samples
