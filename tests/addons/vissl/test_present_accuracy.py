import pytest
import torch
from measuring import seen
from raising import raises

from phasetrain.addons.vissl.present_accuracy import PresentAccuracy
from phasetrain.errors import ConfigError
from phasetrain.meters import Accuracy

SCORES = torch.tensor(
    [[0.1, 0.7, 0.2, 0.6], [0.9, 0.1, 0.4, 0.5], [0.1, 0.8, 0.7, 0.0], [0.6, 0.9, 0.1, 0.5]]
)
CLASSES = torch.tensor([3, 3, 2, 2])


def test_only_present_classes_can_be_predicted():
    assert seen(PresentAccuracy(), SCORES, CLASSES) == {"accuracy": 0.75, "absent": 2.0}
    assert seen(Accuracy(), SCORES, CLASSES) == 0.0
    assert seen(PresentAccuracy(2), SCORES, CLASSES) == {"accuracy": 1.0, "absent": 2.0}


def test_value_is_the_accuracy_without_absent_classes():
    generator = torch.Generator().manual_seed(17)
    scores, target = (
        torch.randn(200, 10, generator=generator),
        torch.randint(3, 8, (200,), generator=generator),
    )
    masked = scores.clone()
    masked[:, [0, 1, 2, 8, 9]] = -torch.inf
    for topk in (1, 3):
        found = seen(PresentAccuracy(topk), scores, target)
        assert found == {"accuracy": seen(Accuracy(topk), masked, target), "absent": 5.0}
        assert found["accuracy"] > seen(Accuracy(topk), scores, target)


def test_classes_of_later_steps_and_other_ranks_are_present():
    first, second = PresentAccuracy(), PresentAccuracy()
    seen(first, SCORES[2:], CLASSES[2:])
    assert first.compute() == {"accuracy": 1.0, "absent": 3.0}  # one class, nothing else to choose
    seen(second, SCORES[:2], CLASSES[:2])
    first.merge_buffers([dict(one.named_buffers()) for one in (first, second)])
    assert first.compute() == {"accuracy": 0.75, "absent": 2.0}


def test_misfitting_topk_and_targets_are_rejected():
    with raises(ConfigError, code="config.conflict"):
        seen(PresentAccuracy(3), SCORES, CLASSES)
    with raises(ConfigError, code="data.label_outside_classes"):
        seen(PresentAccuracy(), SCORES, torch.tensor([4, 1, 1, 1]))
    with pytest.raises(ValueError, match="topk = 0"):
        PresentAccuracy(0)
