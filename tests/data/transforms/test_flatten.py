import torch

from phasetrain.data.transforms import Flatten, Keys


def test_images_become_vectors():
    assert Flatten()(torch.arange(8.0).view(2, 1, 2, 2), Keys([0, 1])).tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
