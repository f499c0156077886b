import numpy as np
import torch

from phasetrain.data.transforms.random_crop import crop_windows


def test_each_image_is_cropped_at_its_own_corner():
    batch = torch.arange(24.0).view(2, 1, 3, 4)
    cuts = crop_windows(batch, np.array([0, 1]), np.array([2, 0]), (2, 2))
    assert cuts.tolist() == [[[[2.0, 3.0], [6.0, 7.0]]], [[[16.0, 17.0], [20.0, 21.0]]]]


def test_all_channels_are_cropped_at_the_same_corner():
    batch = torch.stack([torch.arange(4.0).view(2, 2), 10 + torch.arange(4.0).view(2, 2)])[None]
    assert crop_windows(batch, np.array([1]), np.array([0]), (1, 2)).tolist() == [
        [[[2.0, 3.0]], [[12.0, 13.0]]]
    ]
