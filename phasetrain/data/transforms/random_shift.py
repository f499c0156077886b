"""Random shift by a few pixels."""

from torch import Tensor
from torch.nn.functional import pad

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images
from phasetrain.data.transforms.windows import crop_windows


@TRANSFORMS.register("random_shift")
class RandomShift(BatchTransform):
    """Shifts each image `(C, H, W)` by up to `pixels` vertically and horizontally, with zero
    padding.

    Args:
        pixels: maximum shift, in pixels; each offset in -pixels..pixels is equally likely.

    Raises:
        ValueError: a negative shift.
    """

    def __init__(self, pixels: int) -> None:
        check_at_least(0, pixels=pixels)
        self.pixels = pixels

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the shifted images, same shape."""
        check_images(batch, self)
        offsets = keys.integers(0, 2 * self.pixels + 1, 2)
        height, width = batch.shape[2:]
        return crop_windows(
            pad(batch, [self.pixels] * 4), offsets[:, 0], offsets[:, 1], (height, width)
        )
