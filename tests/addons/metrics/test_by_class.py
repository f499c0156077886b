"""Confusion matrix, accuracy and F1 by class, against scikit-learn."""

import math

import pytest
import torch
from measuring import seen
from raising import raises
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
)

from phasetrain.addons.metrics.confusion_matrix import ConfusionMatrix
from phasetrain.addons.metrics.f1 import F1
from phasetrain.addons.metrics.per_class_accuracy import PerClassAccuracy
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS

GENERATOR = torch.Generator().manual_seed(9)
SCORES = torch.randn(200, 4, generator=GENERATOR)
CLASSES = torch.randint(4, (200,), generator=GENERATOR)
LABELS = torch.rand(200, 4, generator=GENERATOR) < 0.4
BINARY = torch.randint(2, (200,), generator=GENERATOR)
NAMES = ("cat", "dog", "cow", "hen")
PREDICTED = SCORES.argmax(1)


def near(values):
    return [pytest.approx(float(value), abs=1e-12) for value in values]


class TestConfusionMatrix:
    @pytest.mark.parametrize(
        ("normalize", "theirs"),
        [("none", None), ("targets", "true"), ("predictions", "pred"), ("all", "all")],
    )
    def test_matrix_equals_scikit_learn(self, normalize, theirs):
        meter = ConfusionMatrix(4, normalize, class_names=NAMES)
        found = seen(meter, SCORES, CLASSES)
        expected = confusion_matrix(CLASSES.numpy(), PREDICTED.numpy(), normalize=theirs)
        assert meter.compute_matrix().flatten().tolist() == near(expected.flatten())
        assert list(found) == ["of_cat", "of_dog", "of_cow", "of_hen"]
        assert list(found.values()) == near(expected.diagonal())

    def test_table_has_true_classes_as_rows(self):
        meter = ConfusionMatrix(2, class_names=("no", "yes"))
        seen(meter, torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 0, 0]))
        assert meter.table() == {"no": {"no": 1.0, "yes": 2.0}, "yes": {"no": 0.0, "yes": 0.0}}

    def test_one_score_per_sample_is_compared_with_the_threshold(self):
        found = seen(ConfusionMatrix(2, threshold=0.5), SCORES[:, 0].sigmoid(), BINARY)
        expected = confusion_matrix(BINARY.numpy(), (SCORES[:, 0] > 0).numpy())
        assert list(found.values()) == expected.diagonal().tolist()

    def test_recall_of_a_class_without_samples_is_nan(self):
        found = seen(ConfusionMatrix(4, "targets"), SCORES[:3], torch.tensor([0, 1, 1]))
        assert [math.isnan(value) for value in found.values()] == [False, False, True, True]

    def test_unknown_normalization_is_rejected(self):
        with pytest.raises(ConfigError, match=r"METERS.m .*normalize = 'true': .*"):
            METERS.build(
                "confusion_matrix", {"normalize": "true"}, where="METERS.m", facts={"classes": 4}
            )


class TestPerClassAccuracy:
    def test_mean_equals_balanced_accuracy_of_scikit_learn(self):
        meter = PerClassAccuracy(4, class_names=NAMES)
        found = seen(meter, SCORES, CLASSES)
        matrix = confusion_matrix(CLASSES.numpy(), PREDICTED.numpy())
        assert found.pop("mean") == pytest.approx(
            balanced_accuracy_score(CLASSES.numpy(), PREDICTED.numpy()), abs=1e-12
        )
        assert found.pop("absent") == 0.0
        assert list(found.values()) == near(matrix.diagonal() / matrix.sum(1))
        assert meter.table()["dog"] == {
            "accuracy": found["of_dog"],
            "samples": float(matrix.sum(1)[1]),
        }

    def test_absent_classes_are_excluded_and_counted(self):
        found = seen(PerClassAccuracy(3), torch.eye(3)[[0, 0, 1]], torch.tensor([0, 0, 0]))
        assert found["mean"] == 2 / 3
        assert found["absent"] == 2.0
        assert math.isnan(found["of_1"])


class TestF1:
    def test_single_label_values_equal_scikit_learn(self):
        meter = F1(4, per_class=True, class_names=NAMES)
        found = seen(meter, SCORES, CLASSES)
        theirs = [
            f1_score(CLASSES.numpy(), PREDICTED.numpy(), average=how) for how in ("macro", "micro")
        ]
        assert [found.pop("macro"), found.pop("micro")] == near(theirs)
        assert found.pop("absent") == 0.0
        assert list(found.values()) == near(
            f1_score(CLASSES.numpy(), PREDICTED.numpy(), average=None)
        )
        rows = precision_recall_fscore_support(CLASSES.numpy(), PREDICTED.numpy())
        assert list(meter.table()["cow"].values()) == near([column[2] for column in rows])

    def test_multilabel_values_equal_scikit_learn(self):
        found = seen(F1(4, per_class=True), SCORES, LABELS)
        above = (SCORES > 0).numpy()
        theirs = [f1_score(LABELS.numpy(), above, average=how) for how in ("macro", "micro")]
        assert [found["macro"], found["micro"]] == near(theirs)
        assert [found[f"of_{n}"] for n in range(4)] == near(
            f1_score(LABELS.numpy(), above, average=None)
        )
        probabilities = seen(F1(4, threshold=0.5, per_class=True), SCORES.sigmoid(), LABELS)
        assert probabilities == found

    def test_binary_value_equals_scikit_learn(self):
        found = seen(F1(2, per_class=True), SCORES[:, 0], BINARY)
        assert found["of_1"] == pytest.approx(
            f1_score(BINARY.numpy(), (SCORES[:, 0] > 0).numpy()), abs=1e-12
        )

    def test_classes_that_do_not_occur_are_excluded_and_counted(self):
        output, target = torch.eye(5)[[0, 1, 2]], torch.tensor([0, 1, 1])
        found = seen(F1(5), output, target)
        assert found == {
            "macro": pytest.approx(f1_score([0, 1, 1], [0, 1, 2], average="macro")),
            "micro": 2 / 3,
            "absent": 2.0,
        }


@pytest.mark.parametrize("kind", [ConfusionMatrix, PerClassAccuracy, F1])
class TestAll:
    def test_masked_samples_do_not_count(self, kind):
        mask = torch.arange(200) % 3 > 0
        assert seen(kind(4), SCORES, CLASSES, mask) == seen(kind(4), SCORES[mask], CLASSES[mask])
        assert seen(kind(4), SCORES, CLASSES, mask) != seen(kind(4), SCORES, CLASSES)

    def test_targets_outside_the_classes_are_rejected_at_the_end(self, kind):
        meter = kind(4)
        mask = torch.tensor([True, True, True, False])
        with raises(ConfigError, code="data.label_outside_classes"):
            seen(meter, SCORES[:4], torch.tensor([4, -100, 1, 9]), mask)
        meter.reset()
        assert seen(meter, SCORES, CLASSES) == seen(kind(4), SCORES, CLASSES)

    def test_wrong_number_of_classes_is_rejected(self, kind):
        with pytest.raises(ValueError, match=r"classes = 7, .*\b4\b"):
            seen(kind(7), SCORES, CLASSES)
        with pytest.raises(ConfigError, match=r"METERS.m .*classes = 0"):
            METERS.build(str(kind(4).name), {"classes": 0}, where="METERS.m")

    def test_classes_come_from_the_facts(self, kind):
        name = kind(4).name
        with raises(ConfigError, code="config.missing_parameter", key="METERS.m.classes") as caught:
            METERS.build(name, where="METERS.m")
        assert 'METERS={"m": {"classes": ...}}' in str(caught.value)
        assert METERS.build(name, facts={"classes": 4, "class_names": NAMES}).names == NAMES


@pytest.mark.parametrize("kind", [ConfusionMatrix, PerClassAccuracy])
def test_multilabel_targets_are_rejected(kind):
    with pytest.raises(ValueError, match=r"\(N,\).*\(200, 4\)"):
        seen(kind(4), SCORES, LABELS)
