import pytest
import torch
from measuring import seen
from sklearn.metrics import top_k_accuracy_score

from phasetrain.addons.metrics.at_k import PrecisionAtK, RecallAtK
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS

SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.1, 0.2, 0.7]])
LABELS = torch.tensor([[0, 1, 1], [0, 1, 0], [1, 0, 1]])


def test_multilabel_values_equal_hand_computed_ones():
    assert seen(PrecisionAtK([1, 2]), SCORES, LABELS) == {"1": 2 / 3, "2": 3 / 6}
    assert seen(RecallAtK([1, 2]), SCORES, LABELS) == {"1": 2 / 5, "2": 3 / 5}


def test_single_label_values_equal_hand_computed_ones():
    target = torch.tensor([1, 2, 0])
    assert seen(PrecisionAtK([1, 2, 3]), SCORES, target) == {"1": 1 / 3, "2": 2 / 6, "3": 3 / 9}
    assert seen(RecallAtK([1, 2, 3]), SCORES, target) == {"1": 1 / 3, "2": 2 / 3, "3": 1.0}


def test_masked_samples_do_not_count():
    mask = torch.tensor([True, False, True])
    assert seen(PrecisionAtK(2), SCORES, LABELS, mask) == {"2": 3 / 4}
    assert seen(RecallAtK(2), SCORES, LABELS, mask) == {"2": 3 / 4}


def test_random_labels_match_a_loop_over_samples():
    generator = torch.Generator().manual_seed(1)
    scores, labels = (
        torch.randn(200, 12, generator=generator),
        torch.rand(200, 12, generator=generator) < 0.2,
    )
    hits = sum(
        bool(row[number])
        for one, row in zip(scores, labels, strict=True)
        for number in one.argsort(descending=True)[:5]
    )
    assert seen(PrecisionAtK(5), scores, labels) == {"5": hits / 1000}
    assert seen(RecallAtK(5), scores, labels) == {"5": hits / int(labels.sum())}


def test_single_label_recall_equals_top_k_accuracy_of_scikit_learn():
    generator = torch.Generator().manual_seed(2)
    scores, target = (
        torch.randn(300, 8, generator=generator),
        torch.randint(8, (300,), generator=generator),
    )
    expected = top_k_accuracy_score(target.numpy(), scores.numpy(), k=3)
    assert seen(RecallAtK([3]), scores, target) == {"3": pytest.approx(expected, abs=1e-12)}


def test_misfitting_topk_is_rejected():
    with pytest.raises(ValueError, match=r"topk = 4 .*3 classes"):
        seen(RecallAtK([1, 4]), SCORES, LABELS)
    for given in ([], [0], [2, 2]):
        with pytest.raises(ConfigError, match=r"METERS.r .*topk = \[.*.*"):
            METERS.build("recall_at_k", {"topk": given}, where="METERS.r")
