"""Residual networks of any width."""

import pytest
import torch

from phasetrain.models import MODELS

torchvision = pytest.importorskip("torchvision", reason="the extra `torchvision` is not installed")


def make(**params):
    return MODELS.build("resnet", params, facts={"classes": 5})


def test_width_1_has_the_weights_of_torchvision():
    torch.manual_seed(0)
    ours = make(depth=18).state_dict()
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(num_classes=5).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.feature(
    "model.resnet_alexnet",
    "ResNets of any width, AlexNet with batch norm",
    "`MODEL.name=resnet`, `alexnet`",
)
def test_width_multiplies_every_layer():
    model = make(depth=18, width=2, channels=1)
    assert model.conv1.weight.shape == (128, 1, 7, 7)
    assert model.layer4[1].conv2.weight.shape == (1024, 1024, 3, 3)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 5)


def test_last_stride_1_keeps_the_size_of_maps():
    sizes = []
    for stride in (2, 1):
        model = make(depth=18, last_stride=stride).eval()
        model.layer4.register_forward_hook(lambda *call: sizes.append(call[2].shape[-1]))
        model(torch.zeros(1, 3, 64, 64))
    assert sizes == [2, 4]


def test_blocks_begin_as_identities_on_request():
    model = make(depth=18, width=2, params={"zero_init_residual": True})
    assert model.layer3[1].bn2.weight.abs().max() == 0


@pytest.mark.parametrize("params", [{"depth": 20}, {"width": 0}, {"last_stride": 3}])
def test_bad_parameters_are_rejected(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        make(**params)
