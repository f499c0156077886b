"""CutMix: paste a rectangle of another image into each image."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.addons.vision.batch_transforms.mixing import PairMixing, Per
from phasetrain.data.batch_transforms.base import BATCH_TRANSFORMS


@BATCH_TRANSFORMS.register("cutmix")
class CutMix(PairMixing):
    """Replaces a rectangle of each image `(N, C, H, W)` by the same part of another image, and
    mixes targets by area.

    Yun et al. 2019, arXiv:1905.04899: the sides are sqrt(1 - s) of the image with s from
    Beta(alpha, alpha), the centre is uniform, and parts outside the image are clipped; the target's
    share is the remaining area.

    Args:
        alpha: parameter of Beta; the paper uses 1, a uniform s.
        classes, probability, per: see `PairMixing`.
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
        """Return images with rectangles, and the shares of the remaining areas.

        Raises:
            ValueError: the input is not a tensor `(N, C, H, W)`.
        """
        if not isinstance(value, Tensor) or value.ndim != 4:
            received = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the input has to be images (N, C, H, W), and is {received}")
        height, width = value.shape[2:]
        rows = _draw_spans(height, shares, random)
        columns = _draw_spans(width, shares, random)
        # Masks instead of slices: every image may have another rectangle, and one kernel pastes
        # all.
        inside = torch.from_numpy(rows[:, None, :, None] & columns[:, None, None, :])
        mixed = torch.where(inside.to(value.device, non_blocking=True), value[partners], value)
        # The area that was replaced, which is smaller than the drawn one if the rectangle was
        # clipped.
        return mixed, 1.0 - rows.sum(1) * columns.sum(1) / (height * width)


def _draw_spans(
    length: int, shares: NDArray[np.float64], random: np.random.Generator
) -> NDArray[np.bool_]:
    """Return which positions are in a span of sqrt(1 - share) of the length around a random one,
    `(n, length)`."""
    sizes = (length * np.sqrt(1.0 - shares)).astype(np.int64)
    begins = random.integers(0, length, size=len(shares)) - sizes // 2
    places = np.arange(length)
    return (places >= begins[:, None]) & (places < (begins + sizes)[:, None])
