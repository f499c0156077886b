"""Parts that runs with several optimizers name: sparse rows, two that learn against each other, a
scaler, a fault."""

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
from phasetrain.tasks import TASKS, Parts, Position, Task
from phasetrain.tasks.parts import StepEvents

LEVELS = 16
"""Of grey that are told apart."""


@MODELS.register("bag")
class Bag(nn.Module):
    """The sum over embedded pixels, and a linear layer; no batch norm.

    Args:
        sparse: whether gradients of the embedding have the rows of the batch alone.
        width: entries of a row.
        dropout: share of the sum that is dropped.
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
    """A scaler of one's own: begins at `start` and halves its scale after every update.

    Args:
        device: fact.
        start: first scale.
    """

    def __init__(self, device: torch.device, start: float = 1024.0) -> None:
        super().__init__(device.type, init_scale=start)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        super().update(self.get_scale() / 2)


@LOSSES.register("spoilt")
class Spoilt(nn.Module):
    """Cross entropy that is no number in one update of a run.

    Args:
        update: which, from 0 on.
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
    """A generator of digits, and a critic that tells them from those of the data.

    Args:
        width: of the hidden layers.
        dropout: of the critic.
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
        in_turn: critic and generator are updated in turn, not together.
    """

    def __init__(self, parts: Parts, in_turn: bool = False) -> None:
        super().__init__(parts)
        self.in_turn = in_turn

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the losses of critic and generator."""
        fake = self.model.generator(torch.randn(batch.size, 8))
        real = self.model.critic(batch.input.flatten(1))
        critic = softplus(-real).mean() + softplus(self.model.critic(fake.detach())).mean()
        return critic, softplus(-self.model.critic(fake)).mean()

    def forward(self, batch: Batch) -> StepOutput:
        return StepOutput(self.losses(batch)[0], batch.size, batch.size)

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        self.updater.schedule(at.where, at.stage, at.within)
        self.reseed(at)
        (batch,) = batches
        both = dict(zip(("critic", "generator"), self.losses(events.on_batch(batch)), strict=True))
        learning = ["critic", "generator"][at.updates % 2 :][:1] if self.in_turn else [*both]
        for name in learning:
            part: nn.Module = getattr(self.model, name)
            self.updater.backward(both[name], inputs=[*part.parameters()])
        out = StepOutput(sum(both.values()).detach(), batch.size, batch.size)
        return self.update([out], [batch], at, events)
