"""Center crop."""

from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, Keys, TooSmallError, check_images
from phasetrain.data.transforms.joint.geometric import GeometricTransform
from phasetrain.data.transforms.joint.placement import Placement


@TRANSFORMS.register("center_crop")
class CenterCrop(GeometricTransform):
    """Crops the central square of images: `(C, H, W)` becomes `(C, size, size)`.

    If it cannot be exactly central, it is half a pixel up or to the left.

    Args:
        size: height and width of the square, in pixels.

    Raises:
        ValueError: a size below 1.
        TooSmallError: on a batch: images are smaller than the square.
    """

    def __init__(self, size: int) -> None:
        check_at_least(1, size=size)
        self.size = size

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the center of each image, `(N, C, size, size)`."""
        check_images(batch, self)
        top, left = self._find_corner(batch.shape[2], batch.shape[3])
        return batch[:, :, top : top + self.size, left : left + self.size].contiguous()

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return the central square of an image of `size`."""
        top, left = self._find_corner(*size)
        return Placement.crop(top, left, self.size, self.size, (self.size, self.size))

    def _find_corner(self, height: int, width: int) -> tuple[int, int]:
        if min(height, width) < self.size:
            raise TooSmallError(
                f"CenterCrop: images of {height} x {width} pixels are smaller than size = "
                f"{self.size}; lower size, or resize the images first"
            )
        return (height - self.size) // 2, (width - self.size) // 2
