"""Parts that sleep in a known place."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.data import DATASETS
from phasetrain.data.datasets.digits import load_digits
from phasetrain.models import MODELS, SmallCNN

SECONDS = 0.03


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(SECONDS)
        return gradient


@MODELS.register("dawdler")
class Dawdler(nn.Module):
    """A small network that sleeps in its forward or in its backward pass while it trains."""

    def __init__(self, where: str, width: int, dropout: float) -> None:
        super().__init__()
        self.where = where
        self.inner = SmallCNN(classes=10, channels=1, width=width, dropout=dropout)

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.where == "forward":
            time.sleep(SECONDS)
        scores: Tensor = self.inner(images)
        return _Nap.apply(scores) if self.where == "backward" else scores  # type: ignore[no-untyped-call]


@DATASETS.register("slow_digits")
class SlowDigits:
    """Digits; reading a sample sleeps."""

    def __init__(self, split: str, seconds: float = 0.001) -> None:
        self.inner, self.seconds = load_digits(split=split), seconds  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.inner[index]

    def facts(self) -> Any:
        return self.inner.facts()

    def fingerprint(self) -> str:
        return self.inner.fingerprint()
