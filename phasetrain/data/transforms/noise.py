"""Adding noise."""

import torch
from torch import Tensor

from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys


@TRANSFORMS.register("noise")
class Noise(BatchTransform):
    """Adds normal noise to each entry of samples of any shape; the result has the batch's floating
    type.

    Args:
        std: standard deviation of the noise, in the input's units.

    Raises:
        ValueError: a negative deviation; on a batch: values that are not floating.
    """

    def __init__(self, std: float) -> None:
        if std < 0:
            raise ValueError(f"std = {std}: expected a standard deviation of at least 0")
        self.std = std

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch with noise of its own for each sample."""
        if not batch.is_floating_point():
            raise ValueError(f"Noise takes floating values, not {batch.dtype}")
        drawn = keys.normal(*batch.shape[1:]) * self.std
        return batch + torch.from_numpy(drawn).to(batch.dtype)
