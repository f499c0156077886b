"""A program that trains with `phasetrain.fit`, and that can be started again after a kill.

    python fit_program.py objects|classes FOLDER OVERRIDES_AS_JSON

`objects` gives objects for model, data, loss and optimizer, `classes` gives classes. The model logs a
value, and a hook with a state changes the model before the data of each step is fetched.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import phasetrain
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.models.digest import hash_model


class Points(Dataset[tuple[Tensor, int]]):
    """Points on a line with noise from torch's generator, labelled by their sign."""

    def __init__(self, count: int) -> None:
        self.values = torch.linspace(-1, 1, count)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        value = self.values[index]
        return value + 0.1 * torch.randn(4), int(value > 0)


class Net(nn.Module):
    """A network whose output is scaled by an attribute that no checkpoint holds."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2))
        self.out = nn.Linear(width, 2)
        self.strength = 1.0

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.layers(points) * self.strength
        phasetrain.log("hidden", hidden.abs().mean())
        out: Tensor = self.out(hidden)
        return out


class Strengthen(Hook):
    """Sets the strength of the model from the number of steps that have begun."""

    main_only = False

    def __init__(self) -> None:
        self.begun = 0

    def on_step_start(self, run: Run, phase: Phase) -> None:
        self.begun += 1
        run.task.model.strength = 1.0 + 0.1 * self.begun

    def state_dict(self) -> dict[str, int]:
        return {"begun": self.begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["begun"]


def arguments_of(kind: str) -> dict[str, Any]:
    """Return the arguments of `fit` that may be objects or classes."""
    if kind == "classes":
        return {
            "model": Net,
            "train": {"dataset": Points, "count": 80},
            "test": {"TEST": {"dataset": Points, "count": 32}},
            "loss": nn.CrossEntropyLoss,
            "optimizer": {"name": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
        }
    torch.manual_seed(3)
    net = Net()
    return {
        "model": net,
        "train": Points(80),
        "test": Points(32),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    }


def train(kind: str, folder: str, overrides: dict[str, Any]) -> int:
    """Train, compare the weights that the caller gets with those of the run, and return the exit
    code."""
    arguments = arguments_of(kind)
    result = phasetrain.fit(
        **arguments,
        metrics={"accuracy": "accuracy", "hidden": {"name": "logged", "of": "hidden"}},
        epochs=2,
        batch_size=16,
        hooks={"strengthen": Strengthen()},
        RUN={"dir": folder, "give_up_after": None},
        **overrides,
    )
    model = arguments["model"]
    is_same = not isinstance(model, nn.Module) or hash_model(model) == result.digest
    return result.exit_code if is_same else 1


if __name__ == "__main__":
    sys.exit(train(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
