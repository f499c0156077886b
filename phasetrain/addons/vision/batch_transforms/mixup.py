"""Mixup: weighted means of two samples."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.addons.vision.batch_transforms.mixing import PairMixing, Per, blend_pairs
from phasetrain.data.batch_transforms.base import BATCH_TRANSFORMS
from phasetrain.runtime.nested import map_tensors


@BATCH_TRANSFORMS.register("mixup")
class Mixup(PairMixing):
    """Replaces inputs x and targets y by `s x + (1 - s) x'` and `s y + (1 - s) y'`, with s from
    Beta(alpha, alpha).

    Zhang et al. 2018, arXiv:1710.09412. Inputs are floats of any shape, or nested lists, tuples and
    dicts of them.

    Args:
        alpha: parameter of Beta; the paper uses 0.2 for ImageNet.
        classes, probability, per: see `PairMixing`.
    """

    def __init__(
        self,
        alpha: float = 0.2,
        classes: int | None = None,
        probability: float = 1.0,
        per: Per = "batch",
    ) -> None:
        super().__init__(alpha, classes, probability, per)

    def mix(
        self, value: Any, partners: Tensor, shares: NDArray[np.float64], random: np.random.Generator
    ) -> tuple[Any, NDArray[np.float64]]:
        """Return means of inputs, and the shares unchanged."""
        return map_tensors(value, lambda tensor: blend_pairs(tensor, partners, shares)), shares
