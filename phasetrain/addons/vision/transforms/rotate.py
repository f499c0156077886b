"""Rotation as a task: which way is up?"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.data.transforms.base import TRANSFORMS, Keys, TargetTransform, check_images

TURNS = 4
"""Rotations by multiples of 90 degrees."""


@TRANSFORMS.register("rotate")
class Rotate(TargetTransform):
    """Rotates each image `(C, H, W)` by 0, 90, 180 or 270 degrees, counterclockwise, and makes the
    number of quarter turns, 0 to 3, its target (Gidaris et al. 2018, arXiv:1803.07728).

    The target of the dataset is replaced. Samples of one batch have to be square.
    """

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the rotated batch.

        Raises:
            ValueError: several images are not square, so that rotated ones have another shape.
        """
        check_images(batch, self)
        height, width = batch.shape[2:]
        # A single image may have any shape: a crop after it makes images that form a batch.
        if len(batch) > 1 and height != width:
            raise ValueError(
                f"rotate takes square images, not {height} x {width}; insert a crop before it"
            )
        turns = self._draw_turns(keys).tolist()
        rotated = [
            torch.rot90(image, turn, (1, 2)) for image, turn in zip(batch, turns, strict=True)
        ]
        return torch.stack(rotated)

    def make_targets(self, keys: Keys) -> list[int]:
        """Return the number of quarter turns of each image."""
        turns: list[int] = self._draw_turns(keys).tolist()
        return turns

    def _draw_turns(self, keys: Keys) -> NDArray[np.int64]:
        return keys.integers(0, TURNS)
