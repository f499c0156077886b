"""A small training of a linear model from Python."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import phasetrain


def fit_linear(
    folder: Path, train: Any, loss: Any, *, outputs: int = 1, **changes: Any
) -> phasetrain.RunResult:
    """Train a linear model with 4 inputs for an epoch of batches of 8 samples."""
    torch.manual_seed(1)
    return phasetrain.fit(
        nn.Linear(4, outputs),
        train=train,
        loss=loss,
        epochs=1,
        batch_size=8,
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        RUN={"dir": str(folder)},
        **changes,
    )
