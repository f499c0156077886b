"""The training that every framework gets in benchmarks/resume.py, and the record of what it did.

640 samples, batches of 16, so 40 steps per epoch; 3 epochs, 120 updates; AdamW and a cosine; a
checkpoint every 10 updates. The record is taken through hooks of torch itself, which see every
optimizer step and every forward pass, so that no framework is asked and all are measured alike.
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
    """Random points, labelled by a random linear map; an input `(17,)` begins with the sample's
    index.

    With `random`, noise from torch's global generator is added in `__getitem__`, as an augmentation
    would.
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
    """A small network with the same first weights everywhere; with `random`, it has dropout.

    Takes `(N, 17)`, leaves out the index, and returns `(N, 4)`.
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
    """Writes a line for each optimizer step: when, with which samples, to which weights.

    The first line has the weights before the first step of this process. After `kill_after` steps
    the process kills itself with SIGKILL; 0 is never.
    """

    def __init__(self, path: str, kill_after: int) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.kill_after = kill_after
        self.steps = 0
        self.samples: list[int] = []

    def on_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note the indices of the samples that the network learns from."""
        if isinstance(module, Net) and module.training:
            self.samples += args[0][:, 0].long().tolist()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Write the weights that the process starts from."""
        if self.steps == 0:
            self._write({"weights": _digest(optimizer)})

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Write the line of a step, and kill the process if it is time."""
        now = time.monotonic()
        self.steps += 1
        self._write({"seconds": now, "samples": self.samples, "weights": _digest(optimizer)})
        self.samples = []
        if self.steps == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self.file, json.dumps(line).encode() + b"\n")


def record() -> None:
    """Begin the record that benchmarks/resume.py asks for with two environment variables."""
    made = Record(os.environ["RESUME_RECORD"], int(os.environ["RESUME_KILL_AFTER"]))
    register_module_forward_pre_hook(made.on_forward)
    register_optimizer_step_pre_hook(made.before_step)
    register_optimizer_step_post_hook(made.after_step)


@dataclass(frozen=True)
class Wanted:
    """What a peer's script is asked to do; `way` is the framework's own way of doing it, where it
    has several."""

    folder: Path
    random: bool
    workers: int
    resume: bool
    way: str


def wanted() -> Wanted:
    """Return what the command line asks for, and begin the record."""
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
