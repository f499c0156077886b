"""Means, confidence intervals and paired differences of results repeated with several seeds.

The functions know nothing of runs: they take finite numbers, and pairs are formed by equal keys.
Student's t distribution is computed from the incomplete beta function, so that no command needs
SciPy.

Sources: Press et al., Numerical Recipes, 3rd ed., section 6.4 (incomplete beta function);
Snedecor and Cochran, Statistical Methods, 8th ed., chapters 4 and 6 (paired comparisons, sample
size); Holm, A simple sequentially rejective multiple test procedure, 1979.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, correlation, fmean, stdev, variance
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

LEVEL = 0.95
"""Default confidence level of intervals."""

Bounds = tuple[float, float]
"""Smallest and largest possible value."""

UNBOUNDED: Bounds = (-math.inf, math.inf)

POWER = 0.8
"""Default probability with which a planned test finds the difference it is planned for."""

MOST_PAIRS = 1_000_000
"""Largest number of pairs that `count_pairs` returns; more are of no use to anybody."""

TINY = 1e-300
"""Smallest denominator of the continued fraction."""

FRACTION_STEPS = 10_000
"""Maximum number of terms of the continued fraction; it needs about the root of its arguments."""

SIMPSON_STEPS = 1000
"""Number of intervals of the numeric integration over the standard deviation."""

INTEGRATED_SIGMAS = 12.0
"""Bounds of the integration, in standard deviations of the estimated standard deviation."""


@dataclass(frozen=True)
class Summary:
    """Mean and spread of a sample.

    Attributes:
        count: number of values.
        mean: their mean; None without values.
        std: sample standard deviation (divided by count - 1); None with fewer than two values.
        stderr: standard error of the mean; None with fewer than two values.
        low, high: bounds of the confidence interval of the mean; None with fewer than two values.
    """

    count: int
    mean: float | None = None
    std: float | None = None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class PairedDifference:
    """Differences of two groups between values of the same key, such as the same seed.

    Attributes:
        keys: keys that both groups have, in the order of the first group.
        differences: first minus second value of each key.
        summary: mean, standard deviation and confidence interval of the differences.
        p_value: two-sided p value of the paired t test; None with fewer than two pairs.
        correlation: of the paired values; None with fewer than two pairs or a constant group.
        variance_ratio: variance of the differences, divided by the sum of the variances of both
            groups, which is the variance of a difference between independent values. With 0.1, an
            unpaired comparison needs ten times as many runs. None with fewer than two pairs or two
            constant groups.
    """

    keys: tuple[Hashable, ...]
    differences: tuple[float, ...]
    summary: Summary
    p_value: float | None = None
    correlation: float | None = None
    variance_ratio: float | None = None


def summarize_sample(
    values: Sequence[float], level: float = LEVEL, bounds: Bounds = UNBOUNDED
) -> Summary:
    """Return mean, spread and the confidence interval of the mean, by Student's t distribution.

    Args:
        values: finite numbers, which the interval takes as independent and about normal.
        level: confidence level between 0 and 1.
        bounds: possible values, which the interval does not exceed: all values that it loses are
            impossible, so that its level stays.
    """
    count = len(values)
    if count == 0:
        return Summary(0)
    mean = fmean(values)
    if count == 1:
        return Summary(1, mean)
    std = stdev(values)
    stderr = std / math.sqrt(count)
    half_width = find_t_quantile((1 + level) / 2, count - 1) * stderr
    low = max(mean - half_width, bounds[0])
    high = min(mean + half_width, bounds[1])
    return Summary(count, mean, std, stderr, low, high)


def compare_pairs(
    first: Mapping[Key, float],
    second: Mapping[Key, float],
    level: float = LEVEL,
    bounds: Bounds = UNBOUNDED,
) -> PairedDifference:
    """Return the differences `first[key] - second[key]` over the keys of both groups.

    Args:
        first, second: key, such as a seed, -> finite value.
        level: confidence level of the interval of the mean difference.
        bounds: possible values of both groups.
    """
    keys = tuple(key for key in first if key in second)
    paired_first = [first[key] for key in keys]
    paired_second = [second[key] for key in keys]
    differences = tuple(a - b for a, b in zip(paired_first, paired_second, strict=True))
    width = bounds[1] - bounds[0]
    summary = summarize_sample(differences, level, (-width, width))
    if summary.mean is None or summary.stderr is None:
        return PairedDifference(keys, differences, summary)
    unpaired = variance(paired_first) + variance(paired_second)
    return PairedDifference(
        keys,
        differences,
        summary,
        p_value=_test_mean(summary.mean, summary.stderr, len(keys) - 1),
        correlation=_correlate(paired_first, paired_second),
        variance_ratio=variance(differences) / unpaired if unpaired else None,
    )


def count_pairs(
    difference: float, std: float, power: float = POWER, significance: float = 1 - LEVEL
) -> int | None:
    """Return how many pairs a two-sided paired t test needs to find a mean difference.

    Args:
        difference: the mean difference to find; its sign does not matter.
        std: standard deviation of the differences.
        power: probability of a significant result if the difference is as given.
        significance: probability of a significant result if there is no difference.

    Returns:
        the smallest number with at least this power, 2 or more; None if the difference is zero or
        needs more than MOST_PAIRS.
    """
    if difference == 0:
        return None
    if std == 0:
        return 2
    effect = abs(difference) / std
    normal = NormalDist()
    quantiles = normal.inv_cdf(1 - significance / 2) + normal.inv_cdf(power)
    # The normal approximation is a lower bound, at most a few pairs below the exact number.
    estimate = (quantiles / effect) ** 2
    if estimate > MOST_PAIRS:
        return None
    pairs = max(2, math.floor(estimate))
    while compute_power(effect, pairs, significance) < power:
        pairs += 1
    return pairs


def compute_power(effect: float, pairs: int, significance: float = 1 - LEVEL) -> float:
    """Return the probability that a two-sided paired t test is significant.

    The noncentral t distribution is integrated over the estimated standard deviation.

    Args:
        effect: true mean difference in standard deviations of the differences.
        pairs: number of pairs, at least 2.
        significance: probability of a significant result if the effect is zero.
    """
    degrees = pairs - 1
    shift = effect * math.sqrt(pairs)
    critical = find_t_quantile(1 - significance / 2, degrees)
    normal = NormalDist()
    half = degrees / 2
    log_scale = math.log(2) + half * math.log(half) - math.lgamma(half)
    sigma = 1 / math.sqrt(2 * degrees)
    low = max(0.0, 1 - INTEGRATED_SIGMAS * sigma)
    step = (1 + INTEGRATED_SIGMAS * sigma - low) / SIMPSON_STEPS
    total = 0.0
    for node in range(SIMPSON_STEPS + 1):
        ratio = low + node * step  # estimated over true standard deviation
        if ratio == 0:
            # Only with one degree of freedom is the density not zero here.
            density = math.exp(log_scale) if degrees == 1 else 0.0
        else:
            density = math.exp(log_scale + (degrees - 1) * math.log(ratio) - half * ratio**2)
        significant = normal.cdf(shift - critical * ratio) + normal.cdf(-shift - critical * ratio)
        weight = 4 if node % 2 else 2
        if node in (0, SIMPSON_STEPS):
            weight = 1
        total += weight * density * significant
    return total * step / 3


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values: rejecting those at or below a level keeps the probability of
    any false rejection at or below this level, whatever the dependence of the tests.

    Args:
        p_values: of several tests, in any order, which the result keeps.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(order):
        # An adjusted value is never below that of a smaller p value.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def compute_t_tails(t: float, degrees: float) -> float:
    """Return the probability that Student's t is at least as far from zero as `t`.

    Args:
        t: the statistic.
        degrees: degrees of freedom, greater than 0.
    """
    if math.isinf(t):
        return 0.0
    return compute_incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


# A table asks for the same few quantiles again and again, and each takes a bisection.
@lru_cache(maxsize=1024)
def find_t_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t distribution, correct to 9 digits or more.

    Args:
        probability: between 0 and 1, exclusively.
        degrees: degrees of freedom, greater than 0.

    Raises:
        ValueError: a probability outside these bounds.
    """
    if not 0 < probability < 1:
        raise ValueError(f"probability = {probability}: expected a number between 0 and 1")
    if probability < 0.5:
        return -find_t_quantile(1 - probability, degrees)
    tails = 2 * (1 - probability)
    low = 0.0
    high = 1.0
    while compute_t_tails(high, degrees) > tails:
        high *= 2
    # Bisection until no number is between the bounds: 60 cheap evaluations, and no special cases.
    while low < (middle := (low + high) / 2) < high:
        if compute_t_tails(middle, degrees) > tails:
            low = middle
        else:
            high = middle
    return high


def compute_incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function of `x` in [0, 1] for positive `a`, `b`."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta)
    # The continued fraction converges fast below the mean; above it, use the symmetry.
    if x < (a + 1) / (a + b + 2):
        return front * _evaluate_fraction(a, b, x) / a
    return 1 - front * _evaluate_fraction(b, a, 1 - x) / b


def _evaluate_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method."""
    upper = 1.0
    lower = 1 / _avoid_zero(1 - (a + b) * x / (a + 1))
    result = lower
    for m in range(1, FRACTION_STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            lower = 1 / _avoid_zero(1 + coefficient * lower)
            upper = _avoid_zero(1 + coefficient / upper)
            result *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return result


def _avoid_zero(value: float) -> float:
    if abs(value) < TINY:
        return TINY
    return value


def _test_mean(mean: float, stderr: float, degrees: int) -> float:
    """Return the two-sided p value of the hypothesis that a mean is zero."""
    if stderr > 0:
        return compute_t_tails(mean / stderr, degrees)
    if mean == 0:
        return 1.0
    return 0.0


def _correlate(first: Sequence[float], second: Sequence[float]) -> float | None:
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return correlation(first, second)
