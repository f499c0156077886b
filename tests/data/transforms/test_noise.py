import numpy as np
import pytest
import torch

from phasetrain.data.transforms import Keys, Noise


def test_noise_has_these_values():
    noisy = Noise(0.1)(torch.ones(1, 3), Keys([0]))
    assert noisy[0].tolist() == pytest.approx([1.20382, 1.08343, 0.98919], abs=1e-5)


def test_noise_has_mean_0_and_the_standard_deviation():
    noise = Noise(2.0)(torch.full((64, 3, 8, 8), 5.0), Keys(np.arange(64))) - 5
    assert noise.mean().item() == pytest.approx(0, abs=0.06)
    assert noise.std().item() == pytest.approx(2, abs=0.05)


def test_dtype_is_kept():
    assert Noise(0.1)(torch.ones(1, 3, dtype=torch.float64), Keys([0])).dtype == torch.float64


def test_integers_and_negative_deviations_are_rejected():
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        Noise(1)(torch.zeros(1, 3, dtype=torch.uint8), Keys([0]))
    with pytest.raises(ValueError, match="std = -1"):
        Noise(-1)
