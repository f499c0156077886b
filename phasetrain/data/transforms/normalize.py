"""Shifting and scaling channels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images


@TRANSFORMS.register("normalize")
class Normalize(BatchTransform):
    """Makes `(x - mean) / std` of images `(C, H, W)`, channel by channel.

    Args:
        mean: one per channel, or one for all, in the input's units.
        std: as many as `mean`, in the input's units.

    Raises:
        ValueError: lists that are empty or of different lengths, a `std` that is not above 0; on a
            batch: a number of channels that does not fit.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or not mean:
            raise ValueError(
                f"mean = {list(mean)} and std = {list(std)} must have the same number of entries, at least 1"
            )
        if min(std) <= 0:
            raise ValueError(f"std = {list(std)}: expected standard deviations above 0")
        self.mean = torch.tensor(list(mean), dtype=torch.float32)[:, None, None]
        self.std = torch.tensor(list(std), dtype=torch.float32)[:, None, None]

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch shifted and scaled, same shape."""
        check_images(batch, self)
        if len(self.mean) not in (1, batch.shape[1]):
            raise ValueError(
                f"Normalize: mean and std have {len(self.mean)} entries, images {batch.shape[1]} channels"
            )
        return (batch - self.mean) / self.std
