"""Buffers that training changes by parts of a batch, or around weights that the user's code has
frozen, come with a warning."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phasetrain

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.argmax(1) % 3)


def make_net(*, affine: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=affine), nn.Linear(8, 3))


class Scaled(nn.Module):
    """A network that its own code freezes, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net().requires_grad_(False).eval()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.net(inputs) / self.temperature
        return output


class InEvalMode(Scaled):
    """Keeps the mode of the network."""

    def train(self, mode: bool = True) -> "InEvalMode":
        super().train(mode)
        self.net.eval()
        return self


class SetInForward(Scaled):
    """Sets the mode of the network in each pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.net.eval()
        return super().forward(inputs)


class Momentum(nn.Module):
    """A network and a momentum copy of it, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(make_net(), nn.Linear(3, 3))
        self.target = deepcopy(nn.Sequential(self.online[0])).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.online(inputs) + self.target(inputs)
        return output


class Trained(nn.Module):
    """A trained network whose norm has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(affine=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.net(inputs)
        return output


class Codebook(nn.Linear):
    """Keeps the mean of its outputs.

    Args:
        kind: how it does: in place, as a new tensor, not in training, or not at all.
    """

    mean: Tensor

    def __init__(self, kind: str = "in place") -> None:
        super().__init__(4, 3)
        self.kind = kind
        self.register_buffer("mean", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.norm(super().forward(inputs))
        mean = output.detach().square().mean(0)
        if self.kind == "in place" and self.training:
            self.mean.lerp_(mean, 0.1)
        elif self.kind == "new" and self.training:
            self.mean = self.mean.lerp(mean, 0.1)
        return output


def read_warnings(folder: Path, text: str, model: nn.Module, **changes: Any) -> list[str]:
    phasetrain.fit(
        model,
        train=DATA,
        loss="cross_entropy",
        epochs=changes.pop("epochs", 1),
        batch_size=16,
        RUN={"dir": str(folder)},
        **({"OPTIMIZER": {"name": "sgd", "lr": 0.1}} | changes),
    )
    lines = (folder / "log.txt").read_text().splitlines()
    return [line for line in lines if text in line]


@pytest.mark.feature(
    "model.changed_buffers",
    "statistics that change around frozen weights, and buffers that change by parts of a batch, are "
    "found before the first step",
    "`MODEL.freeze`, `OPTIMIZER.accumulate`",
)
@pytest.mark.parametrize(
    ("kind", "changes", "warnings"),
    [
        (Scaled, {}, 1),
        (Scaled, {"MODEL": {"freeze": ["net"]}}, 0),
        (
            Scaled,
            {
                "epochs": None,
                "PHASES": {"stages": [{"epochs": 1, "MODEL": {"freeze": ["net"]}}]},
            },
            0,
        ),
        (InEvalMode, {}, 0),
        (SetInForward, {}, 0),
        (Momentum, {}, 0),
        (Trained, {}, 0),
    ],
)
def test_statistics_around_frozen_weights(
    kind: type[nn.Module], changes: dict[str, Any], warnings: int, tmp_path: Path
) -> None:
    lines = read_warnings(tmp_path, "MODEL.freeze=", kind(), **changes)
    assert len(lines) == warnings
    if warnings:
        assert "1 batch norms" in lines[0]
        assert "net.1" in lines[0]
        assert "MODEL.freeze=[net]" in lines[0]


@pytest.mark.parametrize(
    ("kind", "accumulate", "warnings"),
    [("in place", 2, 1), ("new", 2, 1), ("in place", 1, 0), ("none", 2, 0)],
)
def test_buffers_that_each_micro_batch_changes(
    kind: str, accumulate: int, warnings: int, tmp_path: Path
) -> None:
    section = {"name": "sgd", "lr": 0.1, "accumulate": accumulate}
    lines = read_warnings(tmp_path, "`mean` of MODEL", Codebook(kind), OPTIMIZER=section)
    assert len(lines) == warnings
    assert all("2 changes per update" in line for line in lines)
