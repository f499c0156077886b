import pytest
import torch

from phasetrain.addons.vision.resnet_cifar import ResidualBlock, ResNetCifar


@pytest.mark.parametrize(("depth", "count"), [(20, 269722), (32, 464154), (56, 853018)])
def test_number_of_parameters_is_that_of_the_paper(depth, count):
    assert sum(p.numel() for p in ResNetCifar(10, depth=depth).parameters()) == count


def test_depth_counts_layers_with_weights():
    layers = [
        m
        for m in ResNetCifar(10, depth=32).modules()
        if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)
    ]
    assert len(layers) == 32


def test_features_and_scores_have_the_shapes():
    model = ResNetCifar(7, channels=1).eval()
    batch = torch.rand(2, 1, 32, 32)
    assert model.stages(model.stem(batch)).shape == (2, 64, 8, 8)
    assert model(batch).shape == (2, 7)


def test_shortcut_subsamples_and_pads_channels_with_zeros():
    block = ResidualBlock(2, 4, stride=2).eval()
    torch.nn.init.zeros_(block.second.weight)  # the residual is zero
    features = torch.arange(1.0, 33.0).view(1, 2, 4, 4)
    out = block(features)
    assert out[0, 0].eq(0).all()
    assert out[0, 3].eq(0).all()
    assert out[0, 1].tolist() == [[1, 3], [9, 11]]
    assert out[0, 2].tolist() == [[17, 19], [25, 27]]


@pytest.mark.parametrize("given", [{"depth": 18}, {"classes": 0}, {"channels": 0}])
def test_bad_parameters_are_rejected(given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))} = .*:"):
        ResNetCifar(**{"classes": 2} | given)
