"""AlexNet with batch norm, and its filters for edges."""

import pytest
import torch

from phasetrain.addons.vision.alexnet import AlexNet


@pytest.mark.feature("model.resnet_alexnet")
def test_features_have_the_shapes_of_the_paper():
    model = AlexNet(classes=3, sobel=True).eval()
    shapes = {}
    for name, layer in model.features.named_children():
        layer.register_forward_hook(
            lambda module, given, out, name=name: shapes.update({name: tuple(out.shape[1:])})
        )
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 3)
    assert shapes["0"] == (96, 55, 55)
    assert shapes["2"] == (256, 27, 27)
    assert shapes["6"] == (256, 13, 13)
    assert shapes["7"] == (256, 6, 6)


def test_filters_find_edges_and_are_not_trained():
    model = AlexNet(classes=3, widths=(4, 4, 4, 4, 4), sobel=True)
    image = torch.zeros(1, 3, 5, 5)
    image[:, :, :, 3:] = 3.0
    columns, rows = model.sobel(image)[0]
    assert columns[2].tolist() == [0.0, 0.0, -12.0, -12.0, 12.0]
    assert rows[2].abs().max() == 0
    assert not any(weight.requires_grad for weight in model.sobel.parameters())
    assert model.features[0][0].weight.shape == (4, 2, 11, 11)


def test_other_than_five_widths_are_rejected():
    with pytest.raises(ValueError, match=r"widths = \[8\]"):
        AlexNet(widths=[8])
