"""Means, confidence intervals and paired differences, against values of published tables."""

import pytest

from phasetrain.addons.experiments.statistics import (
    MOST_PAIRS,
    adjust_p_values,
    compare_pairs,
    compute_power,
    compute_t_tails,
    count_pairs,
    find_t_quantile,
    summarize_sample,
)

# Student's own data of 1908: hours of sleep gained by ten patients with each of two drugs.
FIRST_DRUG = dict(enumerate([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]))
SECOND_DRUG = dict(enumerate([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]))


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.95, 4, 2.132),
        (0.975, 5, 2.571),
        (0.995, 9, 3.250),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
        (0.9995, 3, 12.924),
    ],
)
def test_t_quantiles_are_those_of_tables(probability: float, degrees: int, expected: float) -> None:
    assert find_t_quantile(probability, degrees) == pytest.approx(expected, abs=5e-4)
    assert find_t_quantile(1 - probability, degrees) == pytest.approx(-expected, abs=5e-4)


def test_quantile_of_one_degree_of_freedom_is_that_of_the_cauchy_distribution() -> None:
    assert find_t_quantile(0.75, 1) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, float("nan")])
def test_quantile_of_an_impossible_probability_is_an_error(probability: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        find_t_quantile(probability, 3)


def test_tails_of_t_hold_small_p_values() -> None:
    assert compute_t_tails(0.0, 3) == 1.0
    assert compute_t_tails(2.228139, 10) == pytest.approx(0.05, rel=1e-6)
    assert compute_t_tails(10.0, 100_000) == pytest.approx(1.5633e-23, rel=1e-4)
    assert compute_t_tails(float("inf"), 3) == 0.0


def test_interval_of_a_mean_is_that_of_students_t() -> None:
    # 4.303 * 1 / sqrt(3) around 2
    summary = summarize_sample([1.0, 2.0, 3.0])
    assert (summary.count, summary.mean, summary.std) == (3, 2.0, 1.0)
    assert summary.stderr == pytest.approx(0.57735, abs=1e-5)
    assert summary.low == pytest.approx(-0.48414, abs=1e-5)
    assert summary.high == pytest.approx(4.48414, abs=1e-5)


@pytest.mark.feature("sweep.intervals")
def test_intervals_stay_within_the_bounds_of_the_values() -> None:
    # 12.706 * 0.1 around 0.7
    values = [0.6, 0.8]
    summary = summarize_sample(values, bounds=(0.0, 1.0))
    assert (summary.mean, summary.low, summary.high) == (pytest.approx(0.7), 0.0, 1.0)
    free = summarize_sample(values)
    assert (free.low, free.high) == (
        pytest.approx(-0.5706, abs=1e-4),
        pytest.approx(1.9706, abs=1e-4),
    )
    difference = compare_pairs({0: 0.9, 1: 0.5}, {0: 0.1, 1: 0.3}, bounds=(0.0, 1.0)).summary
    assert (difference.mean, difference.low, difference.high) == (pytest.approx(0.5), -1.0, 1.0)


def test_samples_without_a_spread_have_no_interval() -> None:
    assert summarize_sample([]).mean is None
    single = summarize_sample([2.5])
    assert (single.mean, single.std, single.low, single.high) == (2.5, None, None, None)


def test_equal_values_have_an_interval_without_width() -> None:
    summary = summarize_sample([0.5, 0.5])
    assert (summary.std, summary.low, summary.high) == (0.0, 0.5, 0.5)


def test_paired_differences_of_students_data_are_as_published() -> None:
    result = compare_pairs(FIRST_DRUG, SECOND_DRUG)
    assert result.summary.mean == pytest.approx(-1.58)
    assert result.summary.low == pytest.approx(-2.4598858, abs=1e-6)
    assert result.summary.high == pytest.approx(-0.7001142, abs=1e-6)
    assert result.p_value == pytest.approx(0.002833, abs=1e-6)
    assert result.correlation == pytest.approx(0.7951702, abs=1e-6)
    # variances 1.512889 of the differences, 3.200556 and 4.009 of the groups
    assert result.variance_ratio == pytest.approx(0.209837, abs=1e-5)


def test_pairs_are_formed_of_the_keys_that_both_groups_have() -> None:
    result = compare_pairs({3: 1.0, 1: 2.0, 0: 9.0}, {1: 1.5, 2: 7.0, 3: 1.5})
    assert (result.keys, result.differences) == ((3, 1), (-0.5, 0.5))
    assert result.p_value == 1.0


@pytest.mark.parametrize(("second", "count"), [({}, 0), ({1: 2.0}, 1)])
def test_fewer_than_two_pairs_have_no_test(second: dict[int, float], count: int) -> None:
    result = compare_pairs({1: 3.0, 2: 4.0}, second)
    assert result.summary.count == count
    assert (result.p_value, result.correlation, result.variance_ratio) == (None, None, None)


def test_constant_difference_is_certain() -> None:
    result = compare_pairs({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert (result.summary.std, result.p_value, result.variance_ratio) == (0.0, 0.0, 0.0)
    constant = compare_pairs({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert (constant.p_value, constant.correlation, constant.variance_ratio) == (1.0, None, None)


@pytest.mark.parametrize(
    ("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6), (20.0, 2)]
)
def test_pairs_needed_are_those_of_power_tables(effect: float, pairs: int) -> None:
    assert count_pairs(-effect * 3.0, 3.0) == pairs


def test_power_is_that_of_the_noncentral_t_distribution() -> None:
    assert compute_power(0.5, 20) == pytest.approx(0.5645, abs=1e-4)
    assert compute_power(0.0, 5) == pytest.approx(0.05, abs=1e-6)
    assert compute_power(1.0, 2) == pytest.approx(0.092809, abs=1e-6)


def test_pairs_needed_grow_with_power_and_with_a_stricter_level() -> None:
    assert count_pairs(0.5, 1.0, power=0.9) == 44
    assert count_pairs(0.5, 1.0, significance=0.01) == 51


def test_no_number_of_pairs_finds_no_difference() -> None:
    assert count_pairs(0.0, 1.0) is None
    assert count_pairs(1.0, 0.0) == 2
    assert count_pairs(1e-4, 1.0) is None  # 7.8e8 pairs
    assert MOST_PAIRS == 1_000_000


def test_holm_keeps_the_order_and_never_falls() -> None:
    assert adjust_p_values([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert adjust_p_values([0.7, 0.6]) == [1.0, 1.0]
    assert adjust_p_values([]) == []
