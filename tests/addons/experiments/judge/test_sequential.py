"""The sequential test: its formulas, its verdicts, and its error rate when one looks after each
pair."""

import math

import numpy as np
import pytest

from phasetrain.addons.experiments.judge.sequential import (
    Rule,
    Verdict,
    compute_log_evidence,
    decide,
    estimate_resolution,
    find_critical_value,
    forecast_pairs,
    look_at,
)

LOOKS = 20


def simulate_rejections(differences: np.ndarray, error_rate: float) -> np.ndarray:
    """Return for each row of differences whether any look at it excludes zero, from the third on."""
    counts = np.arange(1, differences.shape[1] + 1)
    means = np.cumsum(differences, 1) / counts
    squares = np.cumsum(differences**2, 1) - counts * means**2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(means) / np.sqrt(squares / (counts - 1) / counts)
    critical = np.array([find_critical_value(int(count), error_rate) for count in counts])
    return np.asarray((t[:, 2:] >= critical[2:]).any(1))


class TestFormulas:
    def test_critical_values(self) -> None:
        found = [find_critical_value(pairs, 0.05) for pairs in (1, 2, 3, 4, 6, 10, 20)]
        assert found == pytest.approx([math.inf, math.inf, 17.24, 6.57, 4.84, 4.13, 3.77], abs=0.01)

    @pytest.mark.parametrize("pairs", [3, 5, 30])
    def test_evidence_reaches_the_inverse_of_the_error_rate_at_the_critical_value(
        self, pairs: int
    ) -> None:
        critical = find_critical_value(pairs, 0.05)
        assert math.exp(compute_log_evidence(critical, pairs)) == pytest.approx(20)

    def test_evidence_is_bounded_with_two_pairs(self) -> None:
        assert math.exp(compute_log_evidence(math.inf, 2)) == pytest.approx(math.sqrt(17))

    def test_mean_evidence_of_normal_pairs_without_a_difference_is_one(self) -> None:
        rows = np.random.default_rng(0).standard_normal((40_000, 4))
        t = rows.mean(1) / (rows.std(1, ddof=1) / 2)
        evidence = [math.exp(compute_log_evidence(float(one), 4)) for one in t]
        assert np.mean(evidence) == pytest.approx(1, abs=0.05)

    def test_resolution_is_the_smallest_difference(self) -> None:
        assert estimate_resolution([0.5, 0.75, 0.5, 0.625]) == 0.125
        assert estimate_resolution([0.5, 0.5]) == 0


class TestErrorRate:
    """The probability of a false verdict over 20 looks, each after one more pair."""

    rng = np.random.default_rng(1)

    @pytest.mark.feature("judge")
    @pytest.mark.parametrize(
        ("differences", "most"),
        [
            pytest.param(rng.standard_normal((5000, LOOKS)), 0.03, id="normal"),
            pytest.param(rng.standard_t(3, (5000, LOOKS)), 0.03, id="heavy tails"),
            pytest.param(rng.uniform(-1, 1, (5000, LOOKS)), 0.05, id="uniform"),
            pytest.param(rng.laplace(size=(5000, LOOKS)), 0.03, id="Laplace"),
        ],
    )
    def test_it_stays_below_five_percent(self, differences: np.ndarray, most: float) -> None:
        assert simulate_rejections(differences, 0.05).mean() <= most

    def test_negative_control_quantiles_of_a_single_look_exceed_it(self) -> None:
        differences = np.random.default_rng(2).standard_normal((5000, LOOKS))
        counts = np.arange(1, LOOKS + 1)
        means = np.cumsum(differences, 1) / counts
        spread = np.sqrt((np.cumsum(differences**2, 1) / counts - means**2)[:, 2:])
        t = np.abs(means)[:, 2:] / spread * np.sqrt(counts[2:] - 1)
        assert (t >= 2.5).any(1).mean() > 0.15

    @pytest.mark.parametrize("resolution", [0.5, 2.0, 4.0])
    def test_rounded_metric_stays_below_five_percent(self, resolution: float) -> None:
        rng = np.random.default_rng(3)
        scores = np.round(rng.standard_normal((400, 12, 2)) / resolution) * resolution
        false = [
            decide([(float(a), float(b)) for a, b in row], Rule(0.05)).verdict for row in scores
        ]
        assert np.mean([one is not Verdict.UNDECIDED for one in false]) <= 0.05

    def test_equivalence_with_a_true_difference_of_the_margin_stays_below_five_percent(
        self,
    ) -> None:
        rows = np.random.default_rng(4).standard_normal((300, LOOKS)) + 2
        verdicts = [decide([(0.0, float(x)) for x in row], Rule(0.05, 2)).verdict for row in rows]
        assert np.mean([one is Verdict.EQUIVALENT for one in verdicts]) <= 0.05

    def test_effect_of_two_standard_deviations_is_found_in_ten_pairs(self) -> None:
        rows = np.random.default_rng(5).standard_normal((500, 10)) + 2
        verdicts = [decide([(0.0, float(x)) for x in row], Rule(0.05)).verdict for row in rows]
        assert np.mean([one is Verdict.BETTER for one in verdicts]) >= 0.9
        assert Verdict.WORSE not in verdicts


class TestVerdicts:
    better = [(0.0, 1.0), (0.1, 1.3), (0.2, 1.1), (0.0, 1.1), (0.1, 1.0)]

    def test_better_and_worse(self) -> None:
        look = decide(self.better, Rule())
        assert (look.verdict, look.count) == (Verdict.BETTER, 4)
        assert look.low is not None
        assert look.low > 0
        assert look.p_value < 0.05
        worse = decide([(b, a) for a, b in self.better], Rule())
        assert (worse.verdict, worse.count, worse.mean) == (Verdict.WORSE, 4, -look.mean)

    def test_verdict_stays_when_pairs_are_added(self) -> None:
        assert decide([*self.better, (9.0, 0.0)], Rule()) == decide(self.better, Rule())

    def test_difference_within_the_margin_is_no_difference(self) -> None:
        look = decide([(0.0, 0.01), (0.1, 0.09), (0.2, 0.21), (0.3, 0.29)], Rule(margin=0.5))
        assert (look.verdict, look.count) == (Verdict.EQUIVALENT, 3)

    def test_few_pairs_are_undecided(self) -> None:
        look = decide(self.better[:2], Rule())
        assert (look.verdict, look.low, look.high) == (Verdict.UNDECIDED, None, None)
        assert decide(self.better[:1], Rule()).std is None

    def test_equal_differences_of_a_rounded_metric_are_no_proof(self) -> None:
        one_step = [(0.5, 0.51), (0.52, 0.53), (0.51, 0.52), (0.5, 0.51), (0.52, 0.53)]
        assert decide(one_step, Rule()).verdict is Verdict.UNDECIDED
        assert decide(one_step, Rule()).std == pytest.approx(0.005)

    def test_equal_scores_decide_after_as_many_pairs_as_a_sign_test_needs(self) -> None:
        counts = [decide([(1.0, 1.0)] * n, Rule(0.05, 0.1)).verdict for n in (5, 6)]
        assert counts == [Verdict.UNDECIDED, Verdict.EQUIVALENT]
        assert decide([(1.0, 1.0)] * 9, Rule()).verdict is Verdict.UNDECIDED

    def test_a_smaller_error_rate_takes_more_pairs(self) -> None:
        assert decide(self.better, Rule(0.0005)).verdict is Verdict.UNDECIDED

    def test_forecast(self) -> None:
        look = look_at(self.better[:3], Rule())
        assert forecast_pairs(look, Rule()) == 4
        assert forecast_pairs(look_at([(0.0, 0.1), (0.0, -0.1)], Rule()), Rule()) is None
        assert forecast_pairs(look_at(self.better[:1], Rule()), Rule()) is None
