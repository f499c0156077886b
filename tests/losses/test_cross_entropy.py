import math

import pytest
import torch

from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES, CrossEntropy


def test_uniform_logits_cost_the_logarithm_of_the_classes():
    assert CrossEntropy()(torch.zeros(3, 4), torch.tensor([0, 1, 3])).item() == pytest.approx(
        math.log(4)
    )


def test_loss_is_a_mean_over_samples():
    scores = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    expected = (math.log(4 / 3) + math.log(2)) / 2
    assert CrossEntropy()(scores, torch.tensor([0, 1])).item() == pytest.approx(expected)


def test_label_smoothing_spreads_the_target():
    scores = torch.tensor([[math.log(3), 0.0]])
    expected = 0.9 * math.log(4 / 3) + 0.1 * math.log(4)  # 0.2 spread over both classes
    assert CrossEntropy(0.2)(scores, torch.tensor([0])).item() == pytest.approx(expected)


def test_targets_may_be_probabilities():
    scores = torch.tensor([[math.log(3), 0.0]])
    expected = 0.5 * math.log(4 / 3) + 0.5 * math.log(4)
    assert CrossEntropy()(scores, torch.tensor([[0.5, 0.5]])).item() == pytest.approx(expected)


def test_targets_of_the_ignored_class_do_not_count():
    scores = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    found = CrossEntropy(ignore_index=1)(scores, torch.tensor([0, 1])).item()
    assert found == pytest.approx(math.log(4 / 3))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_smoothing_outside_its_range_is_rejected(smoothing):
    with pytest.raises(ConfigError, match=r"LOSS .*label_smoothing = .*:"):
        LOSSES.build("cross_entropy", {"label_smoothing": smoothing})
