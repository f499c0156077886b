"""A batch transform with its own random generator, and a loss that records its targets."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.data.batch_transforms import BATCH_TRANSFORMS, PairTransform
from phasetrain.engine.batch import Batch
from phasetrain.losses import LOSSES


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

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the batch."""
        self.seen.append((self.training, target))
        return functional.cross_entropy(output, target)
