import numpy as np
import pytest
import torch

from phasetrain.data.transforms import Keys, RandomFlip


def test_columns_are_mirrored_and_rows_are_not():
    image = torch.arange(4.0).view(1, 1, 2, 2)
    assert RandomFlip(1)(image, Keys([0]))[0, 0].tolist() == [[1, 0], [3, 2]]
    assert torch.equal(RandomFlip(0)(image, Keys([0])), image)


def test_images_are_flipped_with_the_probability():
    image = torch.tensor([0.0, 1.0]).expand(2000, 1, 1, 2)
    flipped = RandomFlip(0.3)(image, Keys(np.arange(2000)))[:, 0, 0, 0]
    assert flipped.mean().item() == pytest.approx(0.3, abs=0.04)


@pytest.mark.parametrize("probability", [-0.1, 1.1])
def test_probability_outside_0_to_1_is_rejected(probability):
    with pytest.raises(ValueError, match=f"probability = {probability}:"):
        RandomFlip(probability)
