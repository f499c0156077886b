"""Parts of runs under several strategies: strategies without one necessary step each, and models,
losses and datasets with faults in numbers."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.data import DATASETS
from phasetrain.distributed import STRATEGIES
from phasetrain.distributed.strategies import DataParallel
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.losses import LOSSES
from phasetrain.models import MODELS


@STRATEGIES.register("cold")
class Cold(DataParallel):
    """`ddp` without the warm-up passes before the first step."""

    needs_warmup = False


@MODELS.register("crossed")
class Crossed(nn.Module):
    """Layers of various sizes, created in another order than they are used."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.last = nn.Linear(width, 10)
        self.first = nn.Linear(64, 3 * width)
        self.middle = nn.Linear(3 * width, width)

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.last(self.middle(self.first(value.flatten(1)).relu()).relu())
        return found


@MODELS.register("flat")
class Flat(nn.Module):
    """One layer: two parameters, fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.last(value.flatten(1))
        return found


@LOSSES.register("sharpened")
class Sharpened(nn.Module):
    """Cross entropy of outputs times a learned sharpness; counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.calls += 1.0
        return nn.functional.cross_entropy(output * self.sharpness, target)


@HOOKS.register("taint")
class Taint(Hook):
    """Makes one rank compute NaN in chosen updates, in its loss or in one gradient.

    Args:
        rank: rank that computes NaN.
        updates: numbers of the updates, the first is 1.
        gradient: only the gradient of `last.bias`, which a single rank owns if gradients are
            sharded.
    """

    main_only = False
    observe_only = True

    def __init__(self, rank: int, updates: list[int], *, gradient: bool = False) -> None:
        self.rank, self.updates, self.gradient = rank, updates, gradient

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if run.world.rank == self.rank and phase.is_train and run.state.updates + 1 in self.updates:
            bias = dict(run.task.parts.model.named_parameters())["last.bias"]
            out.loss = (
                out.loss + (bias.sum() * 0.0).sqrt() if self.gradient else out.loss * math.nan
            )


@DATASETS.register("torn_digits")
class TornDigits:
    """Digits; reading some of the samples raises."""

    def __init__(self, bad: list[int], samples: int) -> None:
        self.bad, self.samples = bad, samples
        self.digits = DATASETS.build("digits", {"split": "train"})

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"digit {index} is gone")
        return self.digits[index]

    def facts(self) -> dict[str, object]:
        return dict(self.digits.facts())  # type: ignore[attr-defined]

    def fingerprint(self) -> str:
        return str(self.digits.fingerprint())  # type: ignore[attr-defined]


@MODELS.register("spared")
class Spared(nn.Module):
    """A linear model with a layer that its output does not depend on.

    Args:
        spare: whether there is one.
        used: number of passes, from the first, in which the output depends on it.
    """

    recomputed = ("used",)

    def __init__(self, *, spare: bool = True, used: int = 0) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.spare = nn.Linear(64, 10) if spare else None
        self.used = used

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.flatten(1)
        self.used -= 1
        if self.spare is not None and self.used >= 0:
            return self.head(inputs) + self.spare(inputs)
        return self.head(inputs)
