"""Resizing of images."""

from torch import Tensor
from torch.nn.functional import interpolate

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, Keys, check_images
from phasetrain.data.transforms.joint.geometric import (
    GeometricTransform,
    Interpolation,
    check_interpolation,
)
from phasetrain.data.transforms.joint.placement import Placement


@TRANSFORMS.register("resize")
class Resize(GeometricTransform):
    """Resizes images `(C, H, W)` to `(C, size, size)`, without keeping the aspect ratio.

    Args:
        size: height and width, in pixels.
        interpolation: `bilinear`, antialiased, or `nearest`.

    Raises:
        ValueError: a size below 1, or another interpolation.
    """

    def __init__(self, size: int, interpolation: Interpolation = "bilinear") -> None:
        check_at_least(1, size=size)
        check_interpolation(interpolation)
        self.size = size
        self.interpolation = interpolation

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the resized images, `(N, C, size, size)`."""
        check_images(batch, self)
        if self.interpolation == "nearest":
            return super().__call__(batch, keys)
        return interpolate(batch, size=(self.size, self.size), mode="bilinear", antialias=True)

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return the whole image."""
        return Placement.crop(0, 0, *size, (self.size, self.size))
