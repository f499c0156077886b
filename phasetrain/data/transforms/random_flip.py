"""Random horizontal flip."""

import torch
from torch import Tensor

from phasetrain.config.checks import check_fraction
from phasetrain.data.transforms.base import TRANSFORMS, Keys, check_images
from phasetrain.data.transforms.joint.geometric import GeometricTransform
from phasetrain.data.transforms.joint.placement import Placement


@TRANSFORMS.register("random_flip")
class RandomFlip(GeometricTransform):
    """Flips images `(C, H, W)` horizontally at random.

    Args:
        probability: probability of a flip, independent for each image, in [0, 1].

    Raises:
        ValueError: a probability outside [0, 1].
    """

    any_size = True

    def __init__(self, probability: float = 0.5) -> None:
        check_fraction(probability=probability)
        self.probability = probability

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch with some images flipped, same shape."""
        check_images(batch, self)
        chosen = torch.from_numpy(keys.uniform() < self.probability)
        return torch.where(chosen[:, None, None, None], batch.flip(3), batch)

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return the mirror image, or the image as it is."""
        if key.uniform()[0] < self.probability:
            return Placement(((-1.0, 0.0), (0.0, 1.0)), (float(size[1]), 0.0), size)
        return Placement.crop(0, 0, *size, size)
