"""The cost of deterministic kernels is printed only if it is larger than the noise."""

import pytest

from phasetrain.addons.experiments.certify.attempt import is_deterministic_step
from phasetrain.addons.experiments.certify.timing import WARM_UP, compute_cost


def times(deterministic: float, other: float, spread: float = 0.0) -> list[float]:
    """Return the times of 48 steps, the later ones slower by a part of `spread`."""
    return [
        (deterministic if is_deterministic_step(number) else other) * (1 + spread * (number % 13))
        for number in range(WARM_UP + 48)
    ]


def test_kinds_of_steps_alternate_so_that_a_drift_adds_to_both() -> None:
    assert [is_deterministic_step(number) for number in range(8)] == [
        *(True, False, False, True),
        *(True, False, False, True),
    ]


def test_cost_is_that_of_the_medians() -> None:
    cost = compute_cost(times(0.012, 0.010))
    assert cost.percent == pytest.approx(20.0)
    assert cost.noise_percent == pytest.approx(0.0)
    assert (cost.deterministic_ms, cost.other_ms) == pytest.approx((12.0, 10.0))
    assert str(cost) == "20.0 % (12 ms instead of 10 ms per step, noise 0.0 %)"


def test_cost_below_the_noise_has_no_figure() -> None:
    cost = compute_cost(times(0.0101, 0.010, spread=0.3))
    assert cost.percent is None
    assert cost.noise_percent is not None
    assert cost.noise_percent > 1
    assert str(cost).startswith("below the noise")


def test_first_steps_do_not_count_and_few_steps_are_no_measurement() -> None:
    slow_start = [9.0] * WARM_UP + times(0.012, 0.010)[WARM_UP:]
    assert compute_cost(slow_start) == compute_cost(times(0.012, 0.010))
    assert compute_cost([1.0] * (WARM_UP + 3)).reason == "3 steps are too few"
