"""Random solarization."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.config.checks import check_fraction
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images

WHITE = 255


@TRANSFORMS.register("random_solarize")
class RandomSolarize(BatchTransform):
    """Inverts the bright pixels of images `(C, H, W)` in [0, 1] (Grill et al. 2020,
    arXiv:2006.07733, appendix B), with a threshold that is drawn for each image.

    Args:
        probability: probability that an image is solarized, in [0, 1].
        threshold: smallest and largest threshold, as integers of 8-bit images: pixels of at least
            threshold / 255 become 1 - pixel. 0 inverts all pixels, 256 none.

    Raises:
        ValueError: a probability outside [0, 1], or a threshold other than two integers 0 <= low
            <= high <= 256.
    """

    def __init__(self, probability: float = 0.5, threshold: Sequence[int] = (0, 256)) -> None:
        check_fraction(probability=probability)
        if len(threshold) != 2 or not 0 <= threshold[0] <= threshold[1] <= WHITE + 1:
            raise ValueError(
                f"threshold = {list(threshold)}: expected two integers, 0 <= smallest <= largest "
                f"<= {WHITE + 1}"
            )
        self.probability = probability
        self.threshold = (threshold[0], threshold[1])

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch with some images solarized, same shape."""
        check_images(batch, self)
        low, high = self.threshold
        thresholds = torch.from_numpy(keys.fork(0).integers(low, high + 1)) / WHITE
        # Above all pixels for images that stay as they are.
        thresholds[torch.from_numpy(keys.uniform() >= self.probability)] = torch.inf
        is_bright = batch >= thresholds.to(batch)[:, None, None, None]
        return torch.where(is_bright, 1 - batch, batch)
