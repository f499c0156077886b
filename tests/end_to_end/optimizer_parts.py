"""Parts for runs with several optimizers: a sparse embedding, a generator and a critic, a scaler, a
loss that becomes NaN."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import softplus

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.losses import LOSSES
from phasetrain.models import MODELS
from phasetrain.optim import SCALERS
from phasetrain.tasks import TASKS, GradientPass, Parts, Position, Task
from phasetrain.tasks.parts import StepEvents

LEVELS = 16
"""Number of grey levels, each with an embedding."""


@MODELS.register("bag")
class Bag(nn.Module):
    """The sum over embedded pixels, and a linear layer; no batch norm.

    Args:
        sparse: whether gradients of the embedding are sparse, with only the rows of the batch.
        width: embedding dimension.
        dropout: dropout probability.
    """

    def __init__(
        self,
        sparse: bool = True,
        width: int = 4,
        dropout: float = 0.0,
        classes: int = 10,
        pixels: int = 64,
    ) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(pixels * LEVELS, width, mode="sum", sparse=sparse)
        self.head = nn.Linear(width, classes)
        self.dropout = nn.Dropout(dropout)
        self.pixels = pixels

    def forward(self, images: Tensor) -> Tensor:
        levels = (images.flatten(1) * LEVELS).long().clamp(0, LEVELS - 1)
        return self.head(self.dropout(self.rows(levels + LEVELS * torch.arange(self.pixels))))


@SCALERS.register("halving")
class Halving(GradScaler):
    """A custom scaler that halves its scale after every update.

    Args:
        device: fact.
        start: initial scale.
    """

    def __init__(self, device: torch.device, start: float = 1024.0) -> None:
        super().__init__(device.type, init_scale=start)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        super().update(self.get_scale() / 2)


@LOSSES.register("spoilt")
class Spoilt(nn.Module):
    """Cross entropy that is NaN in one update of a run.

    Args:
        update: index of that update, from 0.
    """

    seen: Tensor

    def __init__(self, update: int) -> None:
        super().__init__()
        self.update = update
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, output: Any, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if self.training:
            loss = loss * (math.nan if int(self.seen) == self.update else 1.0)
            self.seen += 1
        return loss


@MODELS.register("rivals")
class Rivals(nn.Module):
    """A generator of digits, and a critic that separates generated from real digits.

    Args:
        width: width of the hidden layers.
        dropout: dropout probability of the critic.
    """

    def __init__(self, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 64))
        self.critic = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1)
        )


@TASKS.register("adversarial")
class Adversarial(Task):
    """Two losses with a gradient each (Goodfellow et al. 2014, arXiv:1406.2661).

    Args:
        parts: fact.
        in_turn: whether critic and generator are updated in alternate steps instead of together.
    """

    def __init__(self, parts: Parts, in_turn: bool = False) -> None:
        super().__init__(parts)
        self.in_turn = in_turn

    def generate(self, batch: Batch) -> Tensor:
        found: Tensor = self.model.generator(torch.randn(batch.size, 8))
        return found

    def critic_loss(self, batch: Batch) -> StepOutput:
        real = self.model.critic(batch.input.flatten(1))
        fake = self.model.critic(self.generate(batch).detach())
        return StepOutput((softplus(-real) + softplus(fake)).mean(), batch.size, batch.size)

    def generator_loss(self, batch: Batch) -> StepOutput:
        fake = self.model.critic(self.generate(batch))
        return StepOutput(softplus(-fake).mean(), batch.size, batch.size)

    def forward(self, batch: Batch) -> StepOutput:
        return self.critic_loss(batch)

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        self.begin_update(at)
        passes = []
        if not self.in_turn or at.updates % 2 == 0:
            passes.append(self.learn("critic", batches, at, events))
        if not self.in_turn or at.updates % 2 == 1:
            used = passes[0].batches if passes else batches
            passes.append(self.learn("generator", used, at, events, first=not passes))
        done = passes[0] if len(passes) == 1 else passes[0] + passes[1]
        return self.update(done, at, events)

    def learn(
        self,
        name: str,
        batches: list[Batch],
        at: Position,
        events: StepEvents,
        *,
        first: bool = True,
    ) -> GradientPass:
        part: nn.Module = getattr(self.model, name)
        forward = self.critic_loss if name == "critic" else self.generator_loss
        return self.gradient_pass(
            batches, at, events, forward=forward, inputs=[*part.parameters()], first=first
        )


@TASKS.register("adversarial_updaters")
class AdversarialUpdaters(Adversarial):
    """The same GAN with one updater per network: the generator's loss uses the updated critic.

    Args:
        parts: fact.
    """

    separate_updaters = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        self.begin_update(at)
        critic = self.gradient_pass(batches, at, events, forward=self.critic_loss, updater="critic")
        self.step_updater(self.updaters["critic"], critic, at, events)
        generator = self.gradient_pass(
            critic.batches, at, events, forward=self.generator_loss, first=False
        )
        return self.update(critic + generator, at, events)
