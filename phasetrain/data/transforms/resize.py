"""Resizing of images."""

from torch import Tensor
from torch.nn.functional import interpolate

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images


@TRANSFORMS.register("resize")
class Resize(BatchTransform):
    """Resizes images `(C, H, W)` to `(C, size, size)`: bilinear, antialiased, without keeping the
    aspect ratio.

    Args:
        size: height and width, in pixels.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, size: int) -> None:
        check_at_least(1, size=size)
        self.size = size

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the resized images, `(N, C, size, size)`."""
        check_images(batch, self)
        return interpolate(batch, size=(self.size, self.size), mode="bilinear", antialias=True)
