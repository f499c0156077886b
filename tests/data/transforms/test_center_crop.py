import pytest
import torch

from phasetrain.data.transforms import CenterCrop, Keys


def test_middle_of_the_image_is_kept():
    assert CenterCrop(1)(torch.arange(9.0).view(1, 1, 3, 3), Keys([0])).tolist() == [[[[4.0]]]]
    assert CenterCrop(2)(torch.arange(15.0).view(1, 1, 3, 5), Keys([0])).tolist() == [
        [[[1.0, 2.0], [6.0, 7.0]]]
    ]


def test_sizes_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="size = 0"):
        CenterCrop(0)
    with pytest.raises(ValueError, match=r"3 x 5 .*size = 4"):
        CenterCrop(4)(torch.zeros(1, 1, 3, 5), Keys([0]))
