import math

import pytest
import torch
from measuring import seen
from sklearn.metrics import roc_auc_score

from phasetrain.addons.metrics.auroc import AUROC, GroupedAUROC
from phasetrain.addons.metrics.ranking import compute_auroc

GENERATOR = torch.Generator().manual_seed(7)
SCORES = torch.randn(150, 4, generator=GENERATOR)
CLASSES = torch.randint(4, (150,), generator=GENERATOR)
LABELS = torch.rand(150, 4, generator=GENERATOR) < 0.4
BINARY = torch.randint(2, (150,), generator=GENERATOR)
GROUP = torch.randint(20, (150,), generator=GENERATOR)


def test_one_vs_rest_equals_scikit_learn():
    found = seen(AUROC(per_class=True), SCORES, CLASSES)
    probabilities = SCORES.double().softmax(1).numpy()
    expected = roc_auc_score(CLASSES.numpy(), probabilities, multi_class="ovr", average=None)
    assert found == {
        "mean": pytest.approx(expected.mean(), abs=1e-12),
        "absent": 0.0,
        **{f"of_{n}": pytest.approx(expected[n], abs=1e-12) for n in range(4)},
    }


def test_logits_are_ranked_by_log_odds():
    assert (
        abs(
            seen(AUROC(logits=False), SCORES, CLASSES)["mean"]
            - seen(AUROC(), SCORES, CLASSES)["mean"]
        )
        > 1e-3
    )


def test_logits_rank_probabilities_that_are_1_in_float32():
    logits = torch.tensor([[0.0, 40.0], [0.0, 30.0], [0.0, 50.0], [0.0, 20.0]])
    assert seen(AUROC(), logits, torch.tensor([1, 0, 1, 0]))["mean"] == 1.0
    assert seen(AUROC(logits=False), logits.softmax(1), torch.tensor([1, 0, 1, 0]))["mean"] == 0.5


def test_multilabel_equals_scikit_learn():
    expected = roc_auc_score(LABELS.numpy(), SCORES.numpy(), average="macro")
    assert seen(AUROC(), SCORES, LABELS)["mean"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "output", [SCORES[:, 0], SCORES[:, :1], torch.stack([-SCORES[:, 0], SCORES[:, 0]], 1)]
)
def test_binary_task_has_the_area_of_the_second_class(output):
    expected = roc_auc_score(BINARY.numpy(), SCORES[:, 0].numpy())
    assert seen(AUROC(class_names=("no", "yes")), output, BINARY) == {
        "mean": pytest.approx(expected),
        "absent": 0.0,
    }


def test_class_without_both_labels_is_excluded_and_counted():
    labels = LABELS.clone()
    labels[:, 0], labels[:, 2] = False, True
    found = seen(AUROC(per_class=True), SCORES, labels)
    assert found["absent"] == 2.0
    assert found["mean"] == pytest.approx((found["of_1"] + found["of_3"]) / 2)
    assert math.isnan(found["of_0"])


def test_bfloat16_scores_are_accepted():
    assert seen(AUROC(), SCORES.bfloat16(), CLASSES)["mean"] == pytest.approx(
        seen(AUROC(), SCORES, CLASSES)["mean"], abs=0.01
    )


class TestGroups:
    def target(self):
        return {"label": BINARY, "group": GROUP}

    def test_value_is_the_mean_over_groups_weighted_by_samples(self):
        weighted, samples, left_out = 0.0, 0, 0
        for number in range(20):
            mine = number == GROUP
            if 0 < BINARY[mine].sum() < mine.sum():
                weighted += int(mine.sum()) * roc_auc_score(
                    BINARY[mine].numpy(), SCORES[mine, 0].numpy()
                )
                samples += int(mine.sum())
            else:
                left_out += 1
        found = seen(GroupedAUROC(), SCORES[:, 0], self.target())
        assert found == {
            "mean": pytest.approx(weighted / samples, abs=1e-12),
            "groups": 20.0 - left_out,
            "left_out": float(left_out),
        }
        assert abs(found["mean"] - compute_auroc(SCORES[:, 0], BINARY.bool())) > 1e-3

    def test_groups_with_one_label_are_excluded(self):
        target = {"clicked": torch.tensor([1, 0, 1, 1]), "user": torch.tensor([7, 7, 9, 9])}
        found = seen(GroupedAUROC("clicked", "user"), torch.tensor([2.0, 1.0, 0.0, 0.0]), target)
        assert found == {"mean": 1.0, "groups": 1.0, "left_out": 1.0}

    def test_two_scores_are_subtracted_and_masked_samples_do_not_count(self):
        two, mask = torch.stack([SCORES[:, 1], SCORES[:, 0]], 1), torch.arange(150) % 3 > 0
        kept = {key: value[mask] for key, value in self.target().items()}
        apart = SCORES[mask, 0] - SCORES[mask, 1]
        assert seen(GroupedAUROC(), two, self.target(), mask) == seen(GroupedAUROC(), apart, kept)

    @pytest.mark.parametrize(
        ("output", "target", "message"),
        [
            (
                SCORES[:, 0],
                BINARY,
                "'label' .*'group'.*Tensor",
            ),
            (
                SCORES[:, 0],
                {"label": BINARY, "user": GROUP},
                "'group'.*'label', 'user'",
            ),
            (SCORES, {"label": LABELS, "group": GROUP}, r"\(150, 4\)"),
            (
                SCORES[:, 0],
                {"label": BINARY, "group": GROUP.float()},
                "group",
            ),
        ],
    )
    def test_misfitting_inputs_are_rejected(self, output, target, message):
        with pytest.raises(ValueError, match=message):
            seen(GroupedAUROC(), output, target)
