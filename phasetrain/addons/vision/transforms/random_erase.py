"""Random erasing of a rectangle."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.config.checks import check_fraction
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images

ASPECT = 3.3  # height : width of the rectangle is between 1/3.3 and 3.3, as in the paper


@TRANSFORMS.register("random_erase")
class RandomErase(BatchTransform):
    """Sets a random rectangle of images `(C, H, W)` to zero (Zhong et al. 2017, arXiv:1708.04896).

    A side longer than the image is clipped.

    Args:
        probability: probability that an image gets a rectangle, in [0, 1].
        scale: smallest and largest area of the rectangle, as fractions of the area of the image.

    Raises:
        ValueError: a probability outside [0, 1], or a scale other than two numbers 0 < low <= high
            <= 1.
    """

    def __init__(self, probability: float = 0.5, scale: Sequence[float] = (0.02, 0.33)) -> None:
        check_fraction(probability=probability)
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(
                f"scale = {list(scale)}: expected two fractions of the area, 0 < smallest <= "
                "largest <= 1"
            )
        self.probability = probability
        self.scale = (scale[0], scale[1])

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch with rectangles of zeros, same shape."""
        check_images(batch, self)
        chosen, area, aspect, top, left = keys.uniform(5).T
        low, high = self.scale
        part = low + (high - low) * area  # fraction of the area of the image
        # Square root of the aspect ratio, log-uniform.
        root = np.exp(math.log(ASPECT) * (aspect - 0.5))
        erased = chosen < self.probability
        rows = _cover_span(batch.shape[2], np.sqrt(part) * root, top)
        columns = _cover_span(batch.shape[3], np.sqrt(part) / root, left)
        mask = torch.from_numpy(rows[:, :, None] & columns[:, None, :] & erased[:, None, None])
        return batch.masked_fill(mask[:, None], 0)


def _cover_span(
    length: int, part: NDArray[np.float64], place: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return which of `length` rows are covered, bool `(N, length)`: a fraction `part`, at a
    `place` in [0, 1)."""
    covered = np.clip(np.rint(length * part), 1, length)
    first = np.floor(place * (length - covered + 1))
    index = np.arange(length)
    inside: NDArray[np.bool_] = (index >= first[:, None]) & (index < (first + covered)[:, None])
    return inside
