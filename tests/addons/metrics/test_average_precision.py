import math
from functools import partial

import pytest
import torch
from measuring import seen as seen_in_steps
from raising import raises
from sklearn.metrics import average_precision_score

from phasetrain.addons.metrics.average_precision import AveragePrecision
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS

GENERATOR = torch.Generator().manual_seed(3)
SCORES = torch.randn(120, 5, generator=GENERATOR)
LABELS = torch.rand(120, 5, generator=GENERATOR) < 0.3
CLASSES = torch.randint(5, (120,), generator=GENERATOR)

seen = partial(seen_in_steps, steps=4)


def test_multilabel_equals_scikit_learn():
    found = seen(AveragePrecision("step", per_class=True), SCORES, LABELS)
    expected = average_precision_score(LABELS.numpy(), SCORES.numpy(), average=None)
    assert found == {
        "mean": pytest.approx(expected.mean(), abs=1e-12),
        "absent": 0.0,
        **{f"of_{n}": pytest.approx(expected[n], abs=1e-12) for n in range(5)},
    }


@pytest.mark.parametrize("logits", [True, False])
def test_single_label_equals_scikit_learn(logits):
    found = seen(AveragePrecision("step", logits=logits), SCORES, CLASSES)
    ranked = (SCORES.double().softmax(1) if logits else SCORES).numpy()
    positive = torch.nn.functional.one_hot(CLASSES).numpy()
    assert found["mean"] == pytest.approx(average_precision_score(positive, ranked), abs=1e-12)
    other = seen(AveragePrecision("step", logits=not logits), SCORES, CLASSES)
    assert abs(other["mean"] - found["mean"]) > 1e-4


def test_absent_classes_are_excluded_and_counted():
    labels = LABELS.clone()
    labels[:, [1, 3]] = False
    found = seen(AveragePrecision("step", per_class=True), SCORES, labels)
    assert found["absent"] == 2.0
    assert math.isnan(found["of_1"])
    present = average_precision_score(
        labels[:, [0, 2, 4]].numpy(), SCORES[:, [0, 2, 4]].numpy(), average=None
    )
    assert found["mean"] == pytest.approx(present.mean(), abs=1e-12)


def test_nan_score_is_not_an_absent_class():
    scores = SCORES.clone()
    scores[7, 2] = math.nan
    found = seen(AveragePrecision(), scores, LABELS)
    assert found["absent"] == 0.0
    assert math.isnan(found["mean"])


def test_masked_samples_do_not_count():
    mask = torch.arange(120) % 3 > 0
    assert seen(AveragePrecision(), SCORES, LABELS, mask) == seen(
        AveragePrecision(), SCORES[mask], LABELS[mask]
    )
    assert seen(AveragePrecision(), SCORES, LABELS, mask) != seen(
        AveragePrecision(), SCORES, LABELS
    )


def test_values_and_table_have_the_class_names():
    meter = AveragePrecision(class_names=("a", "b", "c", "d", "e"), per_class=True)
    found = seen(meter, SCORES, LABELS)
    assert list(found) == ["mean", "absent", "of_a", "of_b", "of_c", "of_d", "of_e"]
    assert meter.table()["c"] == {
        "average_precision": found["of_c"],
        "positives": float(LABELS[:, 2].sum()),
    }


def test_voc_is_the_default():
    voc, interpolated = (
        seen(AveragePrecision("voc"), SCORES, LABELS),
        seen(AveragePrecision(), SCORES, LABELS),
    )
    assert interpolated == voc
    assert voc["mean"] > seen(AveragePrecision("step"), SCORES, LABELS)["mean"]


def test_misfitting_inputs_are_rejected():
    with raises(ConfigError, code="data.label_outside_classes"):
        seen(AveragePrecision(), SCORES[:3], torch.tensor([5, 1, -1]), steps=1)
    meter = AveragePrecision()
    seen(meter, SCORES, LABELS)
    with raises(ConfigError, code="config.conflict"):
        seen(meter, SCORES, CLASSES)
    with pytest.raises(ConfigError, match=r"METERS.m .*area = 'voc07': .*"):
        METERS.build("average_precision", {"area": "voc07"}, where="METERS.m")
