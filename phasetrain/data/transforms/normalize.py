"""Normalisation of channels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, check_images


@TRANSFORMS.register("normalize")
class Normalize(BatchTransform):
    """Computes `(x - mean) / std` of images `(C, H, W)` per channel.

    Args:
        mean: a number for all channels, or one per channel, in the units of the input.
        std: the same form as `mean`, in the units of the input.

    Raises:
        ValueError: lists that are empty or differ in length, or a `std` that is not positive; on a
            batch: a different number of channels.
    """

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        mean = _to_list(mean)
        std = _to_list(std)
        if len(mean) != len(std) or not mean:
            raise ValueError(
                f"mean = {mean} and std = {std} must have the same number of entries, at least 1"
            )
        if min(std) <= 0:
            raise ValueError(f"std = {std}: expected standard deviations above 0")
        self.mean = torch.tensor(mean, dtype=torch.float32)[:, None, None]
        self.std = torch.tensor(std, dtype=torch.float32)[:, None, None]

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch shifted and scaled, same shape."""
        check_images(batch, self)
        if len(self.mean) not in (1, batch.shape[1]):
            raise ValueError(
                f"Normalize: mean and std have {len(self.mean)} entries, and the images have "
                f"{batch.shape[1]} channels"
            )
        return (batch - self.mean) / self.std


def _to_list(value: float | Sequence[float]) -> list[float]:
    if isinstance(value, int | float):
        return [value]
    return list(value)
