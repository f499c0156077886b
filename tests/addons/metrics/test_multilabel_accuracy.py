import pytest
import torch
from measuring import seen
from sklearn.metrics import accuracy_score, hamming_loss

from phasetrain.addons.metrics.multilabel_accuracy import MultilabelAccuracy

GENERATOR = torch.Generator().manual_seed(15)
SCORES = torch.randn(80, 3, generator=GENERATOR)
LABELS = torch.rand(80, 3, generator=GENERATOR) < 0.4


def test_values_equal_scikit_learn():
    above = (SCORES > 0).numpy()
    expected = {
        "labels": pytest.approx(1 - hamming_loss(LABELS.numpy(), above)),
        "exact": pytest.approx(accuracy_score(LABELS.numpy(), above)),
    }
    assert seen(MultilabelAccuracy(), SCORES, LABELS) == expected
    assert seen(MultilabelAccuracy(0.5), SCORES.sigmoid(), LABELS.float()) == expected


def test_masked_samples_do_not_count():
    mask = torch.arange(80) % 3 > 0
    assert seen(MultilabelAccuracy(), SCORES, LABELS, mask) == seen(
        MultilabelAccuracy(), SCORES[mask], LABELS[mask]
    )


def test_single_label_targets_are_rejected():
    with pytest.raises(ValueError, match=r"labels \(N, C\)"):
        seen(MultilabelAccuracy(), SCORES, torch.zeros(80).long())
