"""U-Net."""

import pytest
import torch
from raising import raises

from phasetrain.addons.vision.unet import UNet
from phasetrain.errors import ConfigError
from phasetrain.models import MODELS


@pytest.mark.feature("segmentation")
@pytest.mark.parametrize("size", [(16, 16), (13, 9), (8, 31)])
def test_output_has_the_size_of_the_image(size: tuple[int, int]) -> None:
    model = UNet(5, channels=2, width=4, depth=3)
    assert model(torch.zeros(2, 2, *size)).shape == (2, 5, *size)


def test_number_of_parameters() -> None:
    assert sum(one.numel() for one in UNet(3).parameters()) == 488_035


def test_every_weight_gets_a_gradient() -> None:
    model = UNet(3, width=4, depth=2)
    model(torch.rand(2, 3, 8, 8)).square().mean().backward()
    assert all(one.grad is not None and one.grad.any() for one in model.parameters())


def test_wrong_depth_is_rejected() -> None:
    with raises(ConfigError):
        MODELS.build("unet", {"depth": 0}, facts={"classes": 2}, where="MODEL")
