"""The training problem for all frameworks in benchmarks/resume.py, and the recorder.

640 samples, batches of 16, so 40 steps per epoch; 3 epochs, 120 updates; AdamW and a cosine
schedule; a checkpoint every 10 updates. The recorder uses torch's own hooks, which see every
optimizer step and forward pass, so that all frameworks are measured alike.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import Dataset

SAMPLES, BATCH, EPOCHS, FEATURES, CLASSES = 640, 16, 3, 16, 4
STEPS = SAMPLES // BATCH  # per epoch
UPDATES = EPOCHS * STEPS
SAVE_EVERY = 10
LR, WEIGHT_DECAY = 1e-2, 1e-2
NOISE, DROPOUT = 0.1, 0.2
SEED = 0


class Samples(Dataset[tuple[Tensor, int]]):
    """Random points labelled by a random linear map; an input `(17,)` starts with the sample index.

    With `random`, `__getitem__` adds noise from torch's global generator, like an augmentation.
    """

    def __init__(self, random: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = (self.points @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
        self.random = random

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point = self.points[index]
        if self.random:
            point = point + NOISE * torch.randn(FEATURES)
        return torch.cat([torch.tensor([float(index)]), point]), int(self.labels[index])


class Net(nn.Module):
    """A small network with the same initial weights everywhere; with `random`, it has dropout.

    Takes `(N, 17)`, ignores the index, and returns `(N, 4)`.
    """

    def __init__(self, random: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(2)
            self.hidden = nn.Linear(FEATURES, 32)
            self.head = nn.Linear(32, CLASSES)
        self.dropout = nn.Dropout(DROPOUT) if random else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.dropout(torch.relu(self.hidden(inputs[:, 1:]))))


class Record:
    """Writes a line for each optimizer step: time, samples, resulting weights.

    The first line has the weights before the first step of this process. After `kill_after` steps
    the process kills itself with SIGKILL; 0 means never.
    """

    def __init__(self, path: str, kill_after: int) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.kill_after = kill_after
        self.steps = 0
        self.samples: list[int] = []

    def on_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the indices of the training samples."""
        if isinstance(module, Net) and module.training:
            self.samples += args[0][:, 0].long().tolist()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Write the initial weights of the process."""
        if self.steps == 0:
            self._write({"weights": _digest(optimizer)})

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Write the line of a step, and kill the process when due."""
        now = time.monotonic()
        self.steps += 1
        self._write({"seconds": now, "samples": self.samples, "weights": _digest(optimizer)})
        self.samples = []
        if self.steps == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self.file, json.dumps(line).encode() + b"\n")


def record() -> None:
    """Start the recorder configured by benchmarks/resume.py in two environment variables."""
    made = Record(os.environ["RESUME_RECORD"], int(os.environ["RESUME_KILL_AFTER"]))
    register_module_forward_pre_hook(made.on_forward)
    register_optimizer_step_pre_hook(made.before_step)
    register_optimizer_step_post_hook(made.after_step)


@dataclass(frozen=True)
class Wanted:
    """Arguments of a framework's script; `way` selects among several ways to resume."""

    folder: Path
    random: bool
    workers: int
    resume: bool
    way: str


def wanted() -> Wanted:
    """Parse the command line and start the recorder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--way", default="")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    record()
    return Wanted(**vars(flags))


def _digest(optimizer: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()[:16]
