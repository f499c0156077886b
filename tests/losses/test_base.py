import pytest
import torch
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES


def test_torch_losses_are_found_by_class_name():
    loss = LOSSES.build("HuberLoss", {"delta": 2.0})
    assert isinstance(loss, torch.nn.HuberLoss)
    assert loss(torch.tensor([3.0]), torch.tensor([0.0])).item() == 4.0


@pytest.mark.parametrize("name", ["Linear", "Module", "_Loss"])
def test_torch_module_that_is_not_a_loss_is_unknown(name):
    with raises(ConfigError, code="config.unknown_part", key="LOSS.name"):
        LOSSES.find(name)


def test_mistyped_class_name_gets_a_suggestion():
    with raises(
        ConfigError, code="config.unknown_part", key="LOSS.name", suggestion="SmoothL1Loss"
    ):
        LOSSES.find("SmoothL1loss")
