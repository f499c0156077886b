"""Parts that each break one promise, as users have written them."""

import os
import shutil
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasetrain.data.transforms import BatchTransform, Keys
from phasetrain.engine.batch import StepOutput
from phasetrain.hooks import Hook
from phasetrain.meters import Meter


class LateNoise:
    """Draws from a generator of its own, but not while the purity check looks."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.calls = 0

    def __call__(self, image: Tensor) -> Tensor:
        self.calls += 1
        return (
            image
            if self.calls <= 20
            else image + torch.randn(image.shape, generator=self.generator)
        )


class CentredByBatch(BatchTransform):
    """Looks at the other samples of the batch."""

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        return batch - batch.mean()


class ForgetfulMeter(Meter):
    """Holds its sum in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("count")
        self.total = 0.0

    def update(self, out: StepOutput) -> None:
        self.count += out.samples
        self.total += float(out.loss.detach()) * out.samples

    def compute(self) -> float:
        return self.total / float(self.count)

    def reset(self) -> None:
        super().reset()
        self.total = 0.0


class DeafMeter(Meter):
    """Does not take over its state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("count")

    def update(self, out: StepOutput) -> None:
        self.count += out.samples

    def compute(self) -> float:
        return float(self.count)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return None


class MovingLoss(nn.Module):
    """Divides by a running mean that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()), persistent=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class ClockLoss(nn.Module):
    """Looks at the clock."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) * (1 + time.monotonic_ns() % 1000 / 1000)


def lost_gradient(output: Tensor, target: Tensor) -> Tensor:
    """Gives the weights a gradient of zero."""
    return nn.functional.cross_entropy(output.detach(), target) + 0 * output.sum()


def reading(output: Tensor, target: Tensor) -> Tensor:
    """Branches on the value of a loss."""
    loss = nn.functional.cross_entropy(output, target)
    return loss if loss < 1e6 else 0 * loss


class CountingModel(nn.Module):
    """Warms up by a Python counter."""

    def __init__(self, classes: int, dim: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(dim, classes))
        self.calls = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += self.training
        output: Tensor = self.body(batch) * min(1.0, self.calls / 100)
        return output


class ItemHook(Hook):
    """Reads the loss in every step."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_step(self, run: Any, phase: Any, out: StepOutput) -> None:
        self.total += out.loss.item()


class CpuHook(Hook):
    """Copies the loss to the host in every step."""

    def on_step(self, run: Any, phase: Any, out: StepOutput) -> None:
        out.loss.cpu()


class ErasingHook(Hook):
    """Deletes the checkpoints when an attempt ends."""

    def on_start(self, run: Any) -> None:
        self.checkpoints = run.folder.file("checkpoints")

    def close(self) -> None:
        shutil.rmtree(self.checkpoints, ignore_errors=True)


class ForgetfulHook(Hook):
    """Says what it holds, and does not take it over."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, run: Any, phase: Any, out: StepOutput) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}


class PatientHook(ForgetfulHook):
    """Reads the loss once in many steps, and the ids, which are on the host, in each."""

    def on_step(self, run: Any, phase: Any, out: StepOutput) -> None:
        if run.state.updates % 100 == 0:
            out.loss.item()

    def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
        self.steps += len(batch.ids.tolist())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def by_rank() -> Any:
    """An order that depends on the number of processes."""

    def order(length: int, seed: int) -> Any:
        return np.roll(np.arange(length, dtype=np.int64), int(os.environ.get("WORLD_SIZE", "1")))

    return order


def own_order() -> Any:
    """An order that ignores the seed it is given."""
    generator = np.random.default_rng(0)

    def order(length: int, seed: int) -> Any:
        return generator.permutation(length)

    return order
