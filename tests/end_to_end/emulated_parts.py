"""Parts for runs on an emulated CUDA device."""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.meters import Meter
from phasetrain.models import MODELS


@MODELS.register("many_norms")
class ManyNorms(nn.Module):
    """A linear layer after batch norms.

    Args:
        norms: number of batch norms.
        classes: fact.
    """

    def __init__(self, norms: int, classes: int = 10) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.BatchNorm1d(64) for _ in range(norms)))
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norms(images.flatten(1)))
        return scores


class Planted(nn.Module):
    """A model that breaks a rule of CUDA.

    Args:
        how: `pool` or `cumsum` (no deterministic kernel), or `constant` (a tensor that does not
            move with the module).
        classes: fact.
    """

    def __init__(self, how: str, classes: int = 10) -> None:
        super().__init__()
        self.how = how
        self.head = nn.Linear(64, classes)
        self.constant = torch.ones(64)

    def forward(self, images: Tensor) -> Tensor:
        if self.how == "pool":
            scaled = images * self.head.weight[0, 0]
            images = images + adaptive_avg_pool2d(scaled, 3).mean()
        pixels = images.flatten(1)
        if self.how == "cumsum":
            pixels = pixels.cumsum(1)
        elif self.how == "constant":
            pixels = pixels * self.constant
        scores: Tensor = self.head(pixels)
        return scores


def masked(output: Tensor, target: Tensor) -> Tensor:
    """A loss that selects samples by a mask, whose number the host has to know."""
    counted = target >= 0
    return cross_entropy(output[counted], target[counted])


class HostMeter(Meter):
    """Adds to a tensor that does not move with the meter."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def update(self, out: StepOutput) -> None:
        self.total += out.loss.detach()

    def compute(self) -> float:
        return float(self.total)


class StepHook(Hook):
    """Does something after each train step.

    Args:
        how: `synchronize`, `numpy`, `kernel` (an operator on the device), or `reuse` (writes to
            pinned memory that is perhaps still being copied to the device).
    """

    observe_only = True

    def __init__(self, how: str) -> None:
        self.how = how

    def on_start(self, run: Run) -> None:
        self.pinned = torch.zeros(4).pin_memory()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if self.how == "synchronize":
            torch.cuda.synchronize()
        elif self.how == "numpy":
            out.loss.numpy()
        elif self.how == "kernel":
            out.loss * 2
        else:
            self.pinned += 1
            self.pinned.to("cuda", non_blocking=True)
