import numpy as np
import pytest
import torch

from phasetrain.data.transforms import Keys, RandomShift


def test_shifts_have_these_values():
    image = torch.arange(1.0, 10.0).view(1, 1, 3, 3)
    assert RandomShift(1)(image, Keys([0]))[0, 0].tolist() == [[4, 5, 6], [7, 8, 9], [0, 0, 0]]
    assert RandomShift(1)(image, Keys([2]))[0, 0].tolist() == [[0, 0, 0], [2, 3, 0], [5, 6, 0]]


def test_all_offsets_are_equally_frequent():
    dot = torch.zeros(900, 1, 3, 3)
    dot[:, :, 1, 1] = 1
    places = RandomShift(1)(dot, Keys(np.arange(900))).sum(0)[0]
    assert places.sum() == 900
    assert places.flatten().tolist() == pytest.approx([100] * 9, abs=35)


def test_shift_of_0_changes_nothing():
    image = torch.rand(2, 3, 4, 5)
    assert torch.equal(RandomShift(0)(image, Keys([0, 1])), image)


def test_negative_shift_is_rejected():
    with pytest.raises(ValueError, match="pixels = -1"):
        RandomShift(-1)
