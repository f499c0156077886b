import numpy as np
import pytest
import torch

from phasetrain.addons.vision.transforms.random_resized_crop import RandomResizedCrop
from phasetrain.data.transforms import Keys


def test_crop_of_the_whole_image_changes_nothing():
    image = torch.arange(12.0).view(1, 1, 3, 4)
    whole = RandomResizedCrop(4, scale=(1.0, 1.0), ratio=(1.0, 1.0))(
        image.expand(1, 1, 3, 4), Keys([0])
    )
    assert whole.shape == (1, 1, 4, 4)
    square = torch.arange(16.0).view(1, 1, 4, 4)
    torch.testing.assert_close(
        RandomResizedCrop(4, scale=(1.0, 1.0), ratio=(1.0, 1.0))(square, Keys([3])), square
    )


def test_crop_has_the_drawn_width_and_lies_within_the_image():
    ramp = (torch.arange(64.0) + 0.5).expand(400, 1, 64, 64)  # the value is the place in pixels
    found = RandomResizedCrop(8, scale=(0.25, 0.25), ratio=(1.0, 1.0))(ramp, Keys(np.arange(400)))
    steps = found.diff(dim=3)
    torch.testing.assert_close(steps, torch.full_like(steps, 32 / 8), atol=1e-3, rtol=0)
    first = found[:, 0, 0, 0]
    assert first.min() >= 2 - 1e-3
    assert first.max() <= 34 + 1e-3
    assert float(first.mean()) == pytest.approx(18, abs=1.5)  # places are drawn evenly


def test_areas_and_aspect_ratios_are_within_their_bounds():
    place = torch.arange(64.0) + 0.5
    batch = torch.stack([place.expand(64, 64), place[:, None].expand(64, 64)]).expand(
        500, 2, 64, 64
    )
    found = RandomResizedCrop(4, scale=(0.1, 0.3), ratio=(0.5, 2.0))(batch, Keys(np.arange(500)))
    wide, tall = found[:, 0].diff(dim=2)[:, 0, 0] * 4, found[:, 1].diff(dim=1)[:, 0, 0] * 4
    share, ratio = wide * tall / 64**2, wide / tall
    assert 0.0999 <= share.min() <= share.max() <= 0.3001
    assert 0.499 <= ratio.min() <= ratio.max() <= 2.001
    assert float(ratio.log().mean()) == pytest.approx(0, abs=0.05)


def test_sample_does_not_depend_on_the_others_of_the_batch():
    images, crop = torch.rand(9, 2, 7, 11), RandomResizedCrop(5)
    together = crop(images, Keys(np.arange(9)))
    for at in range(9):
        assert torch.equal(crop(images[at : at + 1], Keys([at]))[0], together[at])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "size = 0:"),
        ({"size": 4, "scale": [0.5, 0.2]}, r"scale = \[0.5, 0.2\]:"),
        ({"size": 4, "scale": [0.5, 1.5]}, r"scale = \[0.5, 1.5\]"),
        ({"size": 4, "ratio": [0, 1]}, r"ratio = \[0, 1\]"),
    ],
)
def test_bad_parameters_are_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        RandomResizedCrop(**given)
