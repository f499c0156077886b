"""Random solarization, against Pillow."""

import numpy as np
import pytest
import torch

from phasetrain.addons.vision.transforms.random_solarize import RandomSolarize
from phasetrain.data.transforms import Keys


def test_pixels_from_the_threshold_on_are_inverted_as_by_pillow() -> None:
    image = pytest.importorskip("PIL.Image")
    ops = pytest.importorskip("PIL.ImageOps")
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    batch = torch.from_numpy(pixels.astype(np.float32) / 255)[None, None]
    for threshold in (0, 100, 255, 256):
        expected = np.asarray(ops.solarize(image.fromarray(pixels), threshold))
        solarized = RandomSolarize(1, [threshold, threshold])(batch, Keys([3]))
        assert np.array_equal((solarized[0, 0] * 255).round().numpy(), expected)


def test_threshold_is_drawn_for_each_image() -> None:
    batch = torch.full((4000, 1, 1, 1), 0.5)
    batch[:, :, 0, 0] = 0.7
    inverted = RandomSolarize(0.4)(batch, Keys(np.arange(4000)))[:, 0, 0, 0] < 0.5
    # 0.7 is 178.5 of 255: inverted by the thresholds 0 to 178, 179 of 257.
    assert inverted.float().mean().item() == pytest.approx(0.4 * 179 / 257, abs=0.02)
    assert torch.equal(RandomSolarize(0)(batch, Keys(np.arange(4000))), batch)


@pytest.mark.parametrize("given", [{"probability": 1.1}, {"threshold": [0]}, {"threshold": [3, 2]}])
def test_bad_parameters_are_rejected(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} = "):
        RandomSolarize(**given)  # type: ignore[arg-type]
