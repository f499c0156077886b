"""Cutting out a part of random size and shape, brought to one size."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images


@TRANSFORMS.register("random_resized_crop")
class RandomResizedCrop(BatchTransform):
    """Cuts a rectangle out of each image `(C, H, W)` and resizes it, bilinear, to
    `(C, size, size)`.

    As in Szegedy et al. 2014 (arXiv:1409.4842, section 6): area and aspect ratio of the rectangle
    are drawn at random, then its place. A side that would be longer than the image is cut to it.

    Args:
        size: height and width of the result, in pixels.
        scale: smallest and largest area of the rectangle, as shares of the image's area.
        ratio: smallest and largest ratio of its width to its height; drawn evenly in its logarithm.

    Raises:
        ValueError: a size below 1, or bounds that are not above 0 or in the wrong order.
    """

    def __init__(
        self,
        size: int,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (0.75, 1.3333333333333333),
    ) -> None:
        if size < 1:
            raise ValueError(f"size = {size}: expected a number of pixels, at least 1")
        for name, bounds in (("scale", scale), ("ratio", ratio)):
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise ValueError(
                    f"{name} = {list(bounds)}: expected two numbers above 0, the smaller one first"
                )
        if scale[1] > 1:
            raise ValueError(
                f"scale = {list(scale)}: expected shares of the image's area, at most 1"
            )
        self.size = size
        self.scale = tuple(scale)
        self.ratio = tuple(ratio)

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the resized rectangles, `(N, C, size, size)`."""
        check_images(batch, self)
        height, width = batch.shape[2:]
        drawn = keys.uniform(4)
        area = height * width * (self.scale[0] + drawn[:, 0] * (self.scale[1] - self.scale[0]))
        low, high = map(math.log, self.ratio)
        ratio = np.exp(low + drawn[:, 1] * (high - low))
        tall = np.minimum(np.sqrt(area / ratio), height)
        wide = np.minimum(np.sqrt(area * ratio), width)
        rows = _centers(tall, drawn[:, 2] * (height - tall), self.size) / height * 2 - 1
        columns = _centers(wide, drawn[:, 3] * (width - wide), self.size) / width * 2 - 1
        y = torch.from_numpy(rows).to(batch.dtype)
        x = torch.from_numpy(columns).to(batch.dtype)
        n = len(batch)
        size = self.size
        grid = torch.stack(
            [x[:, None, :].expand(n, size, size), y[:, :, None].expand(n, size, size)], dim=3
        )
        return grid_sample(batch, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _centers(
    length: NDArray[np.float64], begin: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """Return the centres of `size` equal parts of intervals, `(N, size)`, in pixels from the
    image's edge."""
    found: NDArray[np.float64] = begin[:, None] + length[:, None] * (np.arange(size) + 0.5) / size
    return found
