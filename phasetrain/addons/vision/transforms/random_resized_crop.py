"""Random crop of varying size and aspect ratio, resized to a fixed size."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, Keys, check_images
from phasetrain.data.transforms.joint.geometric import (
    GeometricTransform,
    Interpolation,
    check_interpolation,
)
from phasetrain.data.transforms.joint.placement import Placement


@TRANSFORMS.register("random_resized_crop")
class RandomResizedCrop(GeometricTransform):
    """Crops a rectangle of each image `(C, H, W)` and resizes it to `(C, size, size)`.

    As in Szegedy et al. 2014 (arXiv:1409.4842, section 6): area and aspect ratio of the rectangle
    are random, then its position. A side longer than the image is clipped.

    Args:
        size: height and width of the result, in pixels.
        scale: smallest and largest area of the rectangle, as fractions of the area of the image.
        ratio: smallest and largest ratio of width to height; log-uniform.
        interpolation: `bilinear` or `nearest`.

    Raises:
        ValueError: a size below 1, bounds that are not positive or in the wrong order, or another
            interpolation.
    """

    def __init__(
        self,
        size: int,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (0.75, 1.3333333333333333),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        check_at_least(1, size=size)
        check_interpolation(interpolation)
        for name, bounds in (("scale", scale), ("ratio", ratio)):
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise ValueError(
                    f"{name} = {list(bounds)}: expected two positive numbers, the smaller one first"
                )
        if scale[1] > 1:
            raise ValueError(
                f"scale = {list(scale)}: expected fractions of the area of the image, at most 1"
            )
        self.size = size
        self.scale = tuple(scale)
        self.ratio = tuple(ratio)
        self.interpolation = interpolation

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the resized rectangles, `(N, C, size, size)`."""
        check_images(batch, self)
        if self.interpolation == "nearest":
            return super().__call__(batch, keys)
        height, width = batch.shape[2:]
        tall, wide, top, left = self._draw_rectangles(height, width, keys)
        # With align_corners=False, -1 and 1 are the outer edges of the image, not the centers of
        # its first and last pixels.
        rows = _sample_centers(tall, top, self.size) / height * 2 - 1
        columns = _sample_centers(wide, left, self.size) / width * 2 - 1
        y = torch.from_numpy(rows).to(batch.dtype)
        x = torch.from_numpy(columns).to(batch.dtype)
        n = len(batch)
        size = self.size
        grid = torch.stack(
            [x[:, None, :].expand(n, size, size), y[:, :, None].expand(n, size, size)], dim=3
        )
        # One grid_sample for the whole batch, although every image has its own rectangle.
        return grid_sample(batch, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return the rectangle of an image of `size`."""
        tall, wide, top, left = (float(array[0]) for array in self._draw_rectangles(*size, key))
        return Placement.crop(top, left, tall, wide, (self.size, self.size))

    def _draw_rectangles(
        self, height: int, width: int, keys: Keys
    ) -> tuple[NDArray[np.float64], ...]:
        """Return heights, widths, upper and left edges of rectangles in pixels, `(N,)` each."""
        drawn = keys.uniform(4)
        area = height * width * (self.scale[0] + drawn[:, 0] * (self.scale[1] - self.scale[0]))
        low, high = map(math.log, self.ratio)
        ratio = np.exp(low + drawn[:, 1] * (high - low))
        tall = np.minimum(np.sqrt(area / ratio), height)
        wide = np.minimum(np.sqrt(area * ratio), width)
        return tall, wide, drawn[:, 2] * (height - tall), drawn[:, 3] * (width - wide)


def _sample_centers(
    length: NDArray[np.float64], begin: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """Return the centers of `size` equal parts of intervals, `(N, size)`, in pixels from the edge
    of the image."""
    centers: NDArray[np.float64] = begin[:, None] + length[:, None] * (np.arange(size) + 0.5) / size
    return centers
