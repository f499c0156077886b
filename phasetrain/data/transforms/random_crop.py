"""Random crop."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, Keys, TooSmallError, check_images
from phasetrain.data.transforms.joint.geometric import GeometricTransform
from phasetrain.data.transforms.joint.placement import Placement


@TRANSFORMS.register("random_crop")
class RandomCrop(GeometricTransform):
    """Crops a random square of each image: `(C, H, W)` becomes `(C, size, size)`.

    Args:
        size: height and width of the square, in pixels.
        padding: zero padding added on each side first, in pixels; that of a mask in
            DATA.*.fields has the value `fill` of the field.

    Raises:
        ValueError: a size below 1 or a negative padding.
        TooSmallError: on a batch: padded images are smaller than the square.
    """

    def __init__(self, size: int, padding: int = 0) -> None:
        check_at_least(1, size=size)
        check_at_least(0, padding=padding)
        self.size = size
        self.padding = padding

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return a square of each image, `(N, C, size, size)`."""
        check_images(batch, self)
        padded = pad(batch, [self.padding] * 4) if self.padding else batch
        top, left = self._draw_corners(padded.shape[2], padded.shape[3], keys)
        return crop_windows(padded, top, left, (self.size, self.size))

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return the square of an image of `size`."""
        added = 2 * self.padding
        top, left = self._draw_corners(size[0] + added, size[1] + added, key)
        side = self.size
        return Placement.crop(
            int(top[0]) - self.padding, int(left[0]) - self.padding, side, side, (side, side)
        )

    def _draw_corners(
        self, height: int, width: int, keys: Keys
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the upper rows and the left columns of squares of padded images, `(N,)` each."""
        if min(height, width) < self.size:
            raise TooSmallError(
                f"RandomCrop: images of {height} x {width} pixels, including padding, are smaller "
                f"than size = {self.size}; lower size or raise padding"
            )
        corners = keys.uniform(2)
        top = (corners[:, 0] * (height - self.size + 1)).astype("int64")
        left = (corners[:, 1] * (width - self.size + 1)).astype("int64")
        return top, left


def crop_windows(
    batch: Tensor, top: NDArray[np.int64], left: NDArray[np.int64], size: tuple[int, int]
) -> Tensor:
    """Return windows `(N, C, *size)` of `(N, C, H, W)` with upper left corners `top` and `left`,
    each `(N,)`."""
    # A view of all windows, (N, C, H - h + 1, W - w + 1, h, w), which takes no memory.
    windows = batch.unfold(2, size[0], 1).unfold(3, size[1], 1)
    return windows[torch.arange(len(batch)), :, torch.from_numpy(top), torch.from_numpy(left)]
