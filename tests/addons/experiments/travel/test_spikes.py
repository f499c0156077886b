"""Spikes are found by a rule that ignores noise and other spikes."""

import numpy as np
import pytest

from phasetrain.addons.experiments.travel.spikes import Spike, find_spikes, measure_usual

CALM = [1.0, 1.1, 0.9, 1.05, 0.95] * 12


def put(**values: float) -> list[float]:
    """Return the calm curve with other values after some places."""
    curve = list(CALM)
    for place, value in values.items():
        curve[int(place[1:])] = value
    return curve


@pytest.mark.parametrize(
    ("values", "spikes"),
    [
        (CALM, []),
        (put(_40=1.3), []),
        (put(_40=3.0), [(41, 41)]),
        (put(_40=3.0, _43=4.0), [(41, 44)]),  # one spike
        (put(_30=50.0, _50=50.0), [(31, 31), (51, 51)]),  # the first one does not hide the second
        (put(_40=float("nan")), [(41, 41)]),
        (put(_5=50.0), []),  # too few values before it
        ([-value for value in CALM], []),
        ([-1.0] * 30 + [5.0] + [-1.0] * 5, [(31, 31)]),
        ([10 * 0.97**place for place in range(200)], []),
        ([2.0] * 40 + [2.01] * 40, []),  # without noise, rounding is no spike
        ([], []),
    ],
)
def test_spikes_of_a_curve(values: list[float], spikes: list[tuple[int, int]]) -> None:
    found = find_spikes(range(1, len(values) + 1), values)
    assert [(spike.update, spike.last) for spike in found] == spikes


@pytest.mark.parametrize("seed", range(20))
def test_noise_with_a_long_tail_has_no_spikes(seed: int) -> None:
    losses = np.random.default_rng(seed).gamma(9, 0.1, 1000)
    assert find_spikes(range(1000), losses) == []


def test_windows_of_long_and_of_short_curves_have_the_same_limits() -> None:
    short = measure_usual(np.array(CALM))
    long = measure_usual(np.array(CALM * 4))
    for one, other in zip(short, long, strict=True):
        assert one.tolist() == other[: len(CALM)].tolist()


def test_height_is_one_at_the_limit() -> None:
    assert Spike(1, 1, 3.0, 1.0, 1.5, 2.0).height == 2
    assert Spike(1, 1, float("nan"), 1.0, 1.5, 2.0).height == float("inf")
