"""Flattening of samples."""

from torch import Tensor

from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys


@TRANSFORMS.register("flatten")
class Flatten(BatchTransform):
    """Flattens samples of any shape: `(N, ...)` becomes `(N, D)`."""

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return vectors `(N, D)`."""
        return batch.reshape(len(batch), -1)
