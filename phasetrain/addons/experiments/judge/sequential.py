"""A sequential test of paired differences whose error rate holds however often one looks.

The mean difference of normal pairs with unknown spread has a confidence sequence: an interval for
each number of pairs, such that all of them together contain the true mean with the stated
probability. So one may look after each pair, stop at any time, and continue later.

The intervals invert a likelihood ratio. With n pairs, t statistic t and v = n - 1 degrees of
freedom, the evidence against a mean of zero is

    E = (1 + n g)^(-1/2) * ((1 + t^2 / v) / (1 + t^2 / (v (1 + n g))))^(n/2),

the Bayes factor of effects from a normal distribution with variance g, in standard deviations. If
the mean is zero, E is a martingale that starts at 1, whatever the spread, so it ever reaches 1 / a
with a probability of at most a (Ville's inequality).

Sources: Lai, On confidence sequences, Annals of Statistics 4, 1976; Rouder et al., Bayesian t tests
for accepting and rejecting the null hypothesis, 2009; Wang and Ramdas, Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance, Sequential Analysis 44, 2025.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean

ERROR_RATE = 0.05
"""Default probability of any false verdict."""

EFFECT_VARIANCE = 8.0
"""Variance g of the effects for which the test is most powerful, in squared standard deviations:
with it, effects of 1, 2 and 5 standard deviations take 14, 6 and 4 pairs on average."""

MOST_PAIRS = 1000
"""Largest number of pairs that `forecast_pairs` returns."""


class Verdict(StrEnum):
    """The verdict on a candidate."""

    IDENTICAL = "identical"
    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "no difference larger than d"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Rule:
    """When a verdict is given.

    Attributes:
        error_rate: probability of a false verdict, in (0, 1), over all looks together.
        margin: smallest difference that matters, greater than 0; None: every difference does.
    """

    error_rate: float = ERROR_RATE
    margin: float | None = None


@dataclass(frozen=True)
class Look:
    """The result of the test on some pairs.

    Attributes:
        verdict: the verdict, never `IDENTICAL`.
        count: number of pairs.
        mean: mean difference; positive values are better.
        std: standard deviation of the differences, but at least half the resolution of the metric;
            None with fewer than two pairs.
        low, high: interval of the true mean; None as long as it is not bounded.
        p_value: valid at every look: the inverse of the largest evidence against a mean of zero.
    """

    verdict: Verdict
    count: int
    mean: float
    std: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float = 1.0


def compute_log_evidence(t: float, pairs: int) -> float:
    """Return the logarithm of the evidence against a mean of zero.

    Args:
        t: t statistic of the pairs; infinite if all differences are equal and not zero.
        pairs: their number, at least 2.
    """
    degrees = pairs - 1
    weight = 1 + pairs * EFFECT_VARIANCE
    if math.isinf(t):
        ratio = math.log(weight)
    else:
        ratio = math.log1p(t * t / degrees) - math.log1p(t * t / (degrees * weight))
    return (pairs * ratio - math.log(weight)) / 2


def find_critical_value(pairs: int, error_rate: float) -> float:
    """Return the absolute t statistic at which the evidence reaches the inverse of the error rate;
    infinite with too few pairs for any verdict.

    Args:
        pairs: number of pairs, at least 1.
        error_rate: in (0, 1).
    """
    weight = 1 + pairs * EFFECT_VARIANCE
    ratio = (weight / error_rate**2) ** (1 / pairs)
    # Above the weight, even equal differences are too little evidence.
    if pairs < 2 or ratio >= weight:
        return math.inf
    return math.sqrt((pairs - 1) * (ratio - 1) / (1 - ratio / weight))


def estimate_resolution(values: Sequence[float]) -> float:
    """Return the smallest difference between two values of a metric that are not equal, 0 if all
    are equal: accuracies over 100 samples differ by multiples of 0.01."""
    ordered = sorted(set(values))
    return min((b - a for a, b in pairwise(ordered)), default=0.0)


def look_at(pairs: Sequence[tuple[float, float]], rule: Rule) -> Look:
    """Return the result of the test on some pairs, without regard to results on fewer of them.

    Args:
        pairs: finite scores of the baseline and of the candidate with the same seed, one pair or
            more; larger ones are better.
        rule: error rate and margin.
    """
    differences = [candidate - baseline for baseline, candidate in pairs]
    count = len(pairs)
    mean = fmean(differences)
    if count < 2:
        return Look(Verdict.UNDECIDED, count, mean)
    # Rounded values may have equal differences by chance. Their spread is not 0, which would make
    # every mean significant.
    resolution = estimate_resolution([score for pair in pairs for score in pair])
    squares = math.fsum((difference - mean) ** 2 for difference in differences)
    std = max(math.sqrt(squares / (count - 1)), resolution / 2)
    critical = find_critical_value(count, rule.error_rate)
    if std == 0:
        return _look_at_equal_scores(count, rule)
    stderr = std / math.sqrt(count)
    p_value = min(1.0, math.exp(-compute_log_evidence(mean / stderr, count)))
    if math.isinf(critical):
        return Look(Verdict.UNDECIDED, count, mean, std, p_value=p_value)
    low = mean - critical * stderr
    high = mean + critical * stderr
    return Look(_decide(low, high, rule), count, mean, std, low, high, p_value)


def _look_at_equal_scores(count: int, rule: Rule) -> Look:
    """Return the result on pairs whose scores are all equal, which say nothing about their
    spread."""
    # As many as a sign test needs for its most extreme outcome.
    if count < 1 - math.log2(rule.error_rate):
        return Look(Verdict.UNDECIDED, count, 0.0, 0.0)
    return Look(_decide(0.0, 0.0, rule), count, 0.0, 0.0, 0.0, 0.0)


def _decide(low: float, high: float, rule: Rule) -> Verdict:
    # Before the sign: a difference that is there, and too small to matter, does not matter.
    if rule.margin is not None and -rule.margin < low and high < rule.margin:
        return Verdict.EQUIVALENT
    if low > 0:
        return Verdict.BETTER
    if high < 0:
        return Verdict.WORSE
    return Verdict.UNDECIDED


def decide(pairs: Sequence[tuple[float, float]], rule: Rule) -> Look:
    """Return the first look at growing numbers of pairs that decides, else the last look.

    So the verdict on some pairs stays as it is when more are added.

    Args:
        pairs: scores of baseline and candidate, in the order of the seeds, one pair or more.
        rule: error rate and margin.
    """
    # The largest evidence up to now counts: the bound holds for the whole sequence.
    p_value = 1.0
    for count in range(1, len(pairs) + 1):
        look = look_at(pairs[:count], rule)
        p_value = min(p_value, look.p_value)
        if look.verdict is not Verdict.UNDECIDED:
            break
    return Look(look.verdict, look.count, look.mean, look.std, look.low, look.high, p_value)


def forecast_pairs(look: Look, rule: Rule) -> int | None:
    """Return how many pairs would decide if mean and spread stayed as they are.

    Returns:
        a number larger than the present one; None if it is above MOST_PAIRS or nothing is known
        about the spread.
    """
    if not look.std:
        return None
    for count in range(look.count + 1, MOST_PAIRS + 1):
        half = find_critical_value(count, rule.error_rate) * look.std / math.sqrt(count)
        if _decide(look.mean - half, look.mean + half, rule) is not Verdict.UNDECIDED:
            return count
    return None
