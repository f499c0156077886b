import pytest
import torch

from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES


def test_losses_of_torch_go_by_their_class_names():
    loss = LOSSES.build("HuberLoss", {"delta": 2.0})
    assert isinstance(loss, torch.nn.HuberLoss)
    assert loss(torch.tensor([3.0]), torch.tensor([0.0])).item() == 4.0


@pytest.mark.parametrize("name", ["Linear", "Module", "_Loss"])
def test_what_is_no_loss_is_not_offered(name):
    with pytest.raises(ConfigError, match="no loss has this name"):
        LOSSES.find(name)


def test_a_mistyped_class_name_gets_the_near_miss():
    with pytest.raises(ConfigError, match="did you mean 'SmoothL1Loss'"):
        LOSSES.find("SmoothL1loss")
