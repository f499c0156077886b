"""Center crop."""

from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images


@TRANSFORMS.register("center_crop")
class CenterCrop(BatchTransform):
    """Crops the central square of images: `(C, H, W)` becomes `(C, size, size)`.

    If it cannot be exactly central, it is half a pixel up or to the left.

    Args:
        size: height and width of the square, in pixels.

    Raises:
        ValueError: a size below 1; on a batch: images smaller than the square.
    """

    def __init__(self, size: int) -> None:
        check_at_least(1, size=size)
        self.size = size

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the center of each image, `(N, C, size, size)`."""
        check_images(batch, self)
        height, width = batch.shape[2:]
        if min(height, width) < self.size:
            raise ValueError(
                f"CenterCrop: images of {height} x {width} pixels are smaller than size = "
                f"{self.size}"
            )
        top = (height - self.size) // 2
        left = (width - self.size) // 2
        return batch[:, :, top : top + self.size, left : left + self.size].contiguous()
