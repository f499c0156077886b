"""Random shift by a few pixels."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, Keys, check_images
from phasetrain.data.transforms.joint.geometric import GeometricTransform
from phasetrain.data.transforms.joint.placement import Placement
from phasetrain.data.transforms.random_crop import crop_windows


@TRANSFORMS.register("random_shift")
class RandomShift(GeometricTransform):
    """Shifts each image `(C, H, W)` by up to `pixels` vertically and horizontally, with zero
    padding.

    Args:
        pixels: maximum shift, in pixels; each offset in -pixels..pixels is equally likely.

    Raises:
        ValueError: a negative shift.
    """

    def __init__(self, pixels: int) -> None:
        check_at_least(0, pixels=pixels)
        self.pixels = pixels

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the shifted images, same shape."""
        check_images(batch, self)
        offsets = self._draw_offsets(keys)
        height, width = batch.shape[2:]
        return crop_windows(
            pad(batch, [self.pixels] * 4), offsets[:, 0], offsets[:, 1], (height, width)
        )

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return the shift of an image of `size`."""
        top, left = self._draw_offsets(key)[0].tolist()
        return Placement.crop(top - self.pixels, left - self.pixels, *size, size)

    def _draw_offsets(self, keys: Keys) -> NDArray[np.int64]:
        """Return the upper left corners of the windows in padded images, `(N, 2)`."""
        return keys.integers(0, 2 * self.pixels + 1, 2)
