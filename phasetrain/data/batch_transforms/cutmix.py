"""Cutmix: a rectangle of another image in each image."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.data.batch_transforms.base import BATCH_TRANSFORMS
from phasetrain.data.batch_transforms.mixing import Mixing, Per


@BATCH_TRANSFORMS.register("cutmix")
class CutMix(Mixing):
    """Replaces a rectangle of each image `(N, C, H, W)` by that of another one, and mixes targets
    by their areas.

    Yun et al. 2019, arXiv:1905.04899: sides are sqrt(1 - s) of those of the image with s from
    Beta(alpha, alpha), the centre is anywhere in it, and what would lie outside is cut off; the
    target's share is what is left of the image.

    Args:
        alpha: 1, a uniform s, is what the paper takes.
        classes, probability, per: see `Mixing`.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        classes: int | None = None,
        probability: float = 1.0,
        per: Per = "batch",
    ) -> None:
        super().__init__(alpha, classes, probability, per)

    def mix(
        self, value: Any, partners: Tensor, shares: NDArray[np.float64], random: np.random.Generator
    ) -> tuple[Any, NDArray[np.float64]]:
        """Return images with rectangles, and the shares of their areas that are left.

        Raises:
            ValueError: the input is not one tensor `(N, C, H, W)`.
        """
        if not isinstance(value, Tensor) or value.ndim != 4:
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"takes images (N, C, H, W), and the input is {given}")
        height, width = value.shape[2:]
        rows = _stretch(height, shares, random)
        columns = _stretch(width, shares, random)
        inside = torch.from_numpy(rows[:, None, :, None] & columns[:, None, None, :])
        mixed = torch.where(inside.to(value.device, non_blocking=True), value[partners], value)
        return mixed, 1.0 - rows.sum(1) * columns.sum(1) / (height * width)


def _stretch(
    length: int, shares: NDArray[np.float64], random: np.random.Generator
) -> NDArray[np.bool_]:
    """Return which places lie in a stretch of sqrt(1 - share) of them around a random one,
    `(n, length)`."""
    sizes = (length * np.sqrt(1.0 - shares)).astype(np.int64)
    begins = random.integers(0, length, size=len(shares)) - sizes // 2
    places = np.arange(length)
    return (places >= begins[:, None]) & (places < (begins + sizes)[:, None])
