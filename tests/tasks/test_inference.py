"""A task asked for predictions outside of any run."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from torch import Tensor, nn

from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import Machine
from phasetrain.tasks.inference import Predictor


class Doubled(nn.Module):
    """Takes a mapping and returns a nested output; in training mode another one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.sizes: list[int] = []

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        self.sizes.append(len(inputs["x"]))
        assert not torch.is_grad_enabled()
        return {"twice": 2 * inputs["x"], "pair": (self.norm(inputs["x"]), inputs["y"])}


@dataclass
class Held:
    model: nn.Module
    machine: Machine


def asked(model: nn.Module, precision: Any = "fp32") -> Predictor:
    task = Predictor()
    task.__dict__["parts"] = Held(model, Machine(torch.device("cpu"), precision))
    return task


def test_batches_give_the_same_predictions_as_all_at_once() -> None:
    model = Doubled()
    model.norm.eval()
    model.train(mode=True)
    model.norm.training = False
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = {"x": np.arange(10, dtype=np.float32).reshape(5, 2), "y": torch.arange(5)}
    task = asked(model)
    whole, pieces = task.predict(inputs), task.predict(inputs, batch_size=2)
    assert model.sizes == [5, 2, 2, 1]
    assert torch.equal(whole["twice"], torch.arange(10.0).view(5, 2) * 2)
    assert torch.equal(pieces["twice"], whole["twice"])
    assert torch.equal(pieces["pair"][1], torch.arange(5))
    assert (model.training, model.norm.training) == (True, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_samples_and_the_precision_of_tests() -> None:
    task = asked(nn.Linear(3, 2), "bf16")
    assert task.predict(torch.zeros(0, 3)).shape == (0, 2)
    assert task.predict(torch.zeros(4, 3)).dtype == torch.bfloat16


def test_bad_arguments_are_rejected() -> None:
    task = asked(nn.Linear(3, 2))
    with pytest.raises(ConfigError, match="batch_size = 0:"):
        task.predict(torch.zeros(2, 3), batch_size=0)
    with raises(ConfigError, key="MODEL"):
        task.predict(torch.zeros(2, 4))
    for nothing in ([], {}, "text", 3):
        with pytest.raises(ConfigError, match="batch"):
            task.predict(nothing)


def test_generation_without_its_add_on_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasetrain.config.addons.load_addons", tuple)
    with raises(ConfigError, code="addon.missing"):
        asked(Doubled()).generate("a")
