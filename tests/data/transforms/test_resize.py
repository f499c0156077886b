import pytest
import torch

from phasetrain.data.transforms import Keys, Resize


def test_image_is_interpolated_bilinearly():
    down = Resize(2)(torch.arange(16.0).view(1, 1, 4, 4), Keys([0]))
    assert down[0, 0].flatten().tolist() == pytest.approx(
        [25 / 7, 36 / 7, 69 / 7, 80 / 7], rel=1e-5
    )
    up = Resize(4)(torch.tensor([[[[0.0, 1.0]]]]), Keys([0]))
    assert up[0, 0].tolist() == [[0.0, 0.25, 0.75, 1.0]] * 4


def test_size_below_1_is_rejected():
    with pytest.raises(ValueError, match="size = 0"):
        Resize(0)
