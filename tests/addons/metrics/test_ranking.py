import math

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from phasetrain.addons.metrics.ranking import (
    compute_auroc,
    compute_auroc_by_group,
    compute_average_precision,
)


def random(samples, seed, *, ties=False):
    """Return scores, the positives among them and a group of each; with ties about ten different
    scores."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(samples, generator=generator)
    if ties:
        scores = (scores * 2).round() / 2
    positive = torch.rand(samples, generator=generator) < 0.3
    return scores, positive, torch.randint(12, (samples,), generator=generator)


def voc(scores, positive):
    """Return the area as the development kit of VOC computes it, rank by rank; for scores that all
    differ."""
    hit = positive[scores.argsort(descending=True)].tolist()
    recall = [0.0] + [sum(hit[:n]) / sum(hit) for n in range(1, len(hit) + 1)] + [1.0]
    precision = [0.0] + [sum(hit[:n]) / n for n in range(1, len(hit) + 1)] + [0.0]
    for n in range(len(precision) - 2, -1, -1):
        precision[n] = max(precision[n], precision[n + 1])
    return sum((recall[n] - recall[n - 1]) * precision[n] for n in range(1, len(recall)))


class TestAveragePrecision:
    def test_values_equal_hand_computed_ones(self):
        scores, positive = (
            torch.tensor([0.9, 0.8, 0.7, 0.6]),
            torch.tensor([False, True, False, True]),
        )
        assert compute_average_precision(scores, positive, "step") == (1 / 2 + 2 / 4) / 2
        assert (
            compute_average_precision(scores, torch.tensor([True, False, False, True]), "step")
            == (1 + 2 / 4) / 2
        )
        late = torch.tensor(
            [False, False, True, True]
        )  # precision 1/3, then 2/4: interpolated, 2/4 at both
        assert compute_average_precision(scores, late, "step") == pytest.approx((1 / 3 + 1 / 2) / 2)
        assert compute_average_precision(scores, late, "voc") == 1 / 2

    @pytest.mark.parametrize("ties", [False, True])
    def test_step_area_equals_scikit_learn(self, ties):
        scores, positive, _ = random(400, 1, ties=ties)
        assert compute_average_precision(scores, positive, "step") == pytest.approx(
            average_precision_score(positive.numpy(), scores.numpy()), abs=1e-12
        )

    def test_voc_area_equals_its_development_kit(self):
        scores, positive, _ = random(300, 2)
        assert compute_average_precision(scores, positive, "voc") == pytest.approx(
            voc(scores, positive), abs=1e-12
        )
        assert (
            compute_average_precision(scores, positive, "voc")
            > compute_average_precision(scores, positive, "step") + 1e-4
        )

    @pytest.mark.parametrize("area", ["voc", "step"])
    def test_order_of_samples_does_not_matter(self, area):
        scores, positive, _ = random(400, 3, ties=True)
        order = torch.randperm(400, generator=torch.Generator().manual_seed(4))
        assert compute_average_precision(
            scores[order], positive[order], area
        ) == compute_average_precision(scores, positive, area)

    def test_value_without_positives_is_nan(self):
        assert math.isnan(
            compute_average_precision(torch.tensor([0.1, 0.2]), torch.tensor([False, False]))
        )
        assert (
            compute_average_precision(torch.tensor([0.1, 0.2]), torch.tensor([True, True])) == 1.0
        )

    def test_nan_score_gives_nan(self):
        assert math.isnan(
            compute_average_precision(torch.tensor([0.1, math.nan]), torch.tensor([False, True]))
        )
        assert math.isnan(compute_auroc(torch.tensor([0.1, math.nan]), torch.tensor([False, True])))


class TestAreaUnderROC:
    def test_values_equal_hand_computed_ones(self):
        positive = torch.tensor([True, True, False, False])
        assert compute_auroc(torch.tensor([4.0, 3.0, 2.0, 1.0]), positive) == 1.0
        assert compute_auroc(torch.tensor([4.0, 1.0, 2.0, 3.0]), positive) == 0.5
        assert compute_auroc(torch.tensor([2.0, 1.0, 1.0, 0.0]), positive) == 3.5 / 4

    @pytest.mark.parametrize("ties", [False, True])
    def test_value_equals_scikit_learn(self, ties):
        scores, positive, _ = random(400, 5, ties=ties)
        found = compute_auroc(scores, positive)
        assert found == pytest.approx(roc_auc_score(positive.numpy(), scores.numpy()), abs=1e-12)
        higher = (scores[positive][:, None] > scores[~positive]).double().mean()
        equal = (scores[positive][:, None] == scores[~positive]).double().mean()
        assert found == pytest.approx(float(higher + equal / 2), abs=1e-12)

    def test_value_without_both_labels_is_nan(self):
        scores = torch.tensor([0.1, 0.2])
        assert math.isnan(compute_auroc(scores, torch.tensor([True, True])))
        assert math.isnan(compute_auroc(scores, torch.tensor([False, False])))
        assert math.isnan(compute_auroc(scores[:0], torch.tensor([False])[:0]))


@pytest.mark.parametrize("ties", [False, True])
def test_groups_are_ranked_independently(ties):
    scores, positive, group = random(300, 6, ties=ties)
    positive[group == 3] = True
    areas, samples = compute_auroc_by_group(scores, positive, group * 1000 - 5)
    for number in range(12):
        mine = group == number
        assert samples[number] == mine.sum()
        expected = compute_auroc(scores[mine], positive[mine])
        assert areas[number].item() == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert areas.isnan().tolist() == [number == 3 for number in range(12)]


def test_nan_invalidates_its_group_only():
    scores = torch.tensor([0.1, math.nan, 0.1, 0.2])
    areas, _ = compute_auroc_by_group(
        scores, torch.tensor([False, True, False, True]), torch.tensor([0, 0, 1, 1])
    )
    assert areas.isnan().tolist() == [True, False]
    assert areas[1] == 1.0
