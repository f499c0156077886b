"""Common base of mixup and CutMix: partners, shares and soft targets."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.config.checks import check_at_least, check_fraction, check_positive
from phasetrain.data.batch_transforms.base import PairTransform, make_soft_target
from phasetrain.engine.batch import Batch

Per = Literal["batch", "sample"]


class PairMixing(PairTransform):
    """Mixes each sample of a micro-batch with another one, by a random permutation of the samples
    that count.

    Classes `(N,)` become probabilities `(N, classes)`, even if nothing is mixed.

    Args:
        alpha: shares are drawn from Beta(alpha, alpha).
        classes: number of classes; not needed if targets are floats, such as `(N, C)` labels or
            values.
        probability: probability that a micro-batch is mixed.
        per: `batch` draws one share per micro-batch, as reference implementations do, `sample` one
            per sample.

    Raises:
        ValueError: alpha is not positive, probability is outside [0, 1], or there is less than one
            class.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        classes: int | None = None,
        probability: float = 1.0,
        per: Per = "batch",
    ) -> None:
        check_positive(alpha=alpha)
        check_fraction(probability=probability)
        check_at_least(1, classes=classes)
        if per not in ("batch", "sample"):
            raise ValueError(f"per = {per!r}: expected batch or sample")
        self.alpha = alpha
        self.classes = classes
        self.probability = probability
        self.per = per

    @abstractmethod
    def mix(
        self, value: Any, partners: Tensor, shares: NDArray[np.float64], random: np.random.Generator
    ) -> tuple[Any, NDArray[np.float64]]:
        """Return mixed inputs and the share of the sample itself in each.

        Args:
            value: the input, first dimension N.
            partners: index of the other sample, int64 `(N,)`, on the device.
            shares: shares drawn for the sample itself, in [0, 1], `(1,)` or `(N,)`.
            random: generator for further draws.
        """

    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        """Return the mixed micro-batch."""
        target = make_soft_target(batch, self.classes)
        counted = list_counted(batch, len(target))
        if random.random() >= self.probability or len(counted) < 2:
            return replace(batch, target=target)
        partners = draw_partners(counted, target, random)
        value, shares = self.mix(
            batch.input, partners, self.draw_shares(len(target), random), random
        )
        return replace(batch, input=value, target=blend_pairs(target, partners, shares))

    def draw_shares(self, rows: int, random: np.random.Generator) -> NDArray[np.float64]:
        """Return the share of the sample itself, in [0, 1], `(1,)` or `(rows,)`."""
        return random.beta(self.alpha, self.alpha, size=rows if self.per == "sample" else 1)


def draw_partners(counted: NDArray[np.int64], like: Tensor, random: np.random.Generator) -> Tensor:
    """Return the index of the other sample for each row of a tensor, int64 `(N,)`, on its
    device.

    Args:
        counted: rows that count.
        like: a tensor `(N, ...)`.
        random: generator of the permutation.
    """
    order = np.arange(len(like))
    # Padding remains its own partner, so it cannot leak into a sample that counts.
    order[counted] = random.permutation(counted)
    return torch.from_numpy(order).to(like.device, non_blocking=True)


def blend_pairs(one: Tensor, partners: Tensor, shares: NDArray[np.float64]) -> Tensor:
    """Return `share * one + (1 - share) * one[partners]`, same shape and type.

    Raises:
        ValueError: the tensor is not of floats.
    """
    if not one.is_floating_point():
        dtype = str(one.dtype).removeprefix("torch.")
        raise ValueError(f"the input has to be floats, and is {dtype}; convert it with a transform")
    weight = torch.from_numpy(shares).to(one.device, one.dtype, non_blocking=True)
    # lerp returns its second argument exactly at weight 1, so an unmixed sample keeps its bits.
    return torch.lerp(one[partners], one, weight.view(-1, *[1] * (one.ndim - 1)))


def list_counted(batch: Batch, rows: int) -> NDArray[np.int64]:
    """Return the rows that count."""
    if batch.mask is None or not batch.size:
        return np.arange(rows if batch.size else 0)
    # Waits for the device, but batches in training rarely have a mask.
    return batch.mask.nonzero().flatten().cpu().numpy()
