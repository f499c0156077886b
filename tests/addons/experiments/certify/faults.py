"""Parts that each break the promise of an exact resume, in a way that only a kill or a second run
shows."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.data.datasets import load_digits
from phasetrain.hooks import Hook

CALLS_BEFORE = 60
"""Samples that are read before the counter shows: more than the check of a dataset reads."""


class OwnGenerator(nn.Module):
    """Adds noise from a generator that no checkpoint has."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.body(batch)
        return output + 0.01 * torch.randn(output.shape, generator=self.generator)


class LateHook(Hook):
    """Begins to count after all updates of a certified run, and counts the first ones in vain."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.count = 0
        self.late = 0

    def on_update(self, run: Any, phase: Any) -> None:
        if run.state.updates >= self.first:
            self.count += 1
        if run.state.updates > 1000:
            self.late += 1
        if self.count + self.late > 1000:
            run.stop("enough")


class Urandom(torch.autograd.Function):
    """Has a backward pass that gives other bits each time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + int.from_bytes(os.urandom(2), "little") * 1e-6)


class OtherBits(OwnGenerator):
    """Uses an operator without a deterministic backward pass."""

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = Urandom.apply(self.body(batch))
        return output


class Failing(nn.Module):
    """Cannot be computed."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("this loss fails")


class DroppedMomentum(torch.optim.SGD):
    """Saves no momentum."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "state": {}}


class DeafMomentum(torch.optim.SGD):
    """Saves its momentum, and does not load it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class Counting:
    """Adds a number that depends on the samples that this process has read."""

    classes = 10

    def __init__(self) -> None:
        self.samples = load_digits("train")
        self.calls = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.calls += 1
        image, target = self.samples[index]
        return image + 0.001 * max(0, self.calls - CALLS_BEFORE), target
