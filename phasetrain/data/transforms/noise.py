"""Additive noise."""

import torch
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys


@TRANSFORMS.register("noise")
class Noise(BatchTransform):
    """Adds normal noise to each element of samples of any shape, in the floating type of the batch.

    Args:
        std: standard deviation of the noise, in the units of the input.

    Raises:
        ValueError: a negative deviation; on a batch: values that are not floats.
    """

    def __init__(self, std: float) -> None:
        check_at_least(0, std=std)
        self.std = std

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch with independent noise for each sample."""
        if not batch.is_floating_point():
            raise ValueError(f"Noise takes floats, not {batch.dtype}")
        drawn = keys.normal(*batch.shape[1:]) * self.std
        return batch + torch.from_numpy(drawn).to(batch.dtype)
