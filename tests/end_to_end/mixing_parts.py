"""Batch transforms, and a loss that records its targets."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.data.batch_transforms import BATCH_TRANSFORMS, PairTransform, make_soft_target
from phasetrain.engine.batch import Batch
from phasetrain.losses import LOSSES


@BATCH_TRANSFORMS.register("blended")
class Blended(PairTransform):
    """Blends each sample and its target with the one before it, by one random share.

    Args:
        classes: number of classes.
        least: smallest share of the sample itself.

    Raises:
        ValueError: `least` is not in (0, 1].
    """

    def __init__(self, classes: int, least: float = 0.5) -> None:
        if not 0 < least <= 1:
            raise ValueError(f"least = {least}: expected a number in (0, 1]")
        self.classes = classes
        self.least = least

    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        """Return the blended batch."""
        share = random.uniform(self.least, 1)
        target = make_soft_target(batch, self.classes)
        return replace(
            batch,
            input=torch.lerp(batch.input.roll(1, 0), batch.input, share),
            target=torch.lerp(target.roll(1, 0), target, share),
        )


@BATCH_TRANSFORMS.register("unkeyed")
class Unkeyed(PairTransform):
    """Scales inputs by numbers from a generator whose state advances with every batch."""

    def __init__(self) -> None:
        self._own = torch.Generator().manual_seed(0)

    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        """Return the scaled batch."""
        return replace(batch, input=batch.input * (0.5 + torch.rand((), generator=self._own)))


@LOSSES.register("noting")
class Noting(nn.Module):
    """Cross entropy that keeps the targets of its calls.

    Attributes:
        seen: targets, in the order of the calls.
    """

    seen: list[tuple[bool, Tensor]] = []
    recomputed = ("seen",)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the batch."""
        self.seen.append((self.training, target))
        return functional.cross_entropy(output, target)
