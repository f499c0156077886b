import numpy as np
import pytest
import torch

from phasetrain.data.transforms import Keys, RandomCrop


def test_crops_have_these_values():
    image = torch.arange(9.0).view(1, 1, 3, 3)
    assert RandomCrop(2)(image, Keys([0]))[0, 0].tolist() == [[3, 4], [6, 7]]
    assert RandomCrop(2)(image, Keys([2]))[0, 0].tolist() == [[1, 2], [4, 5]]


def test_all_corners_are_equally_frequent():
    image = torch.arange(12.0).view(1, 1, 3, 4).expand(600, 1, 3, 4)
    corners = RandomCrop(2)(image, Keys(np.arange(600)))[:, 0, 0, 0].int()
    counts = torch.bincount(corners)
    assert counts[[0, 1, 2, 4, 5, 6]].sum() == 600
    assert counts[[0, 1, 2, 4, 5, 6]].tolist() == pytest.approx([100] * 6, abs=30)


def test_padding_is_zero():
    crops = RandomCrop(3, padding=1)(torch.ones(50, 1, 3, 3), Keys(np.arange(50)))
    assert sorted(set(crops.sum((1, 2, 3)).tolist())) == [4.0, 6.0, 9.0]


def test_image_smaller_than_the_crop_is_rejected():
    with pytest.raises(ValueError, match=r"5 x 5 .*size = 6"):
        RandomCrop(6, padding=1)(torch.zeros(1, 1, 3, 3), Keys([0]))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"size": 0}, "size = 0:"), ({"size": 2, "padding": -1}, "padding = -1:")],
)
def test_bad_parameters_are_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        RandomCrop(**given)
