"""Fused SGD with momentum takes weights whose first gradient comes later than those of others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from torch import Tensor, nn

from phasetrain.optim.optimizers import step_first_gradients

OPTIONS: list[dict[str, Any]] = [
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.9, "dampening": 0.5},
    {},
]


class EarlyExit(nn.Module):
    """Uses its second layer in every third training step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.second = nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        out: Tensor = self.first(flat)
        if self.training:
            self.calls += 1
        if int(self.calls) % 3 == 0:
            out = out + self.second(flat)
        return out


@pytest.mark.parametrize("options", OPTIONS)
def test_update_is_that_of_sgd_without_fusing(options: dict[str, Any]) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(5)) for _ in range(3)]
        optimizer = torch.optim.SGD(weights, lr=0.1, fused=fused, **options)
        step_first_gradients(optimizer)
        for step in range(4):
            for number, weight in enumerate(weights):
                weight.grad = torch.randn(5) if number <= step and number != step - 2 else None
            optimizer.step()
        found.append(torch.stack([weight.detach() for weight in weights]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def test_weights_that_always_get_gradients_keep_the_bits_of_plain_torch() -> None:
    found = []
    for changes in (step_first_gradients, id):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(5)) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True)
        changes(optimizer)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(5)
            optimizer.step()
        found.append(torch.stack([weight.detach() for weight in weights]))
    assert torch.equal(*found)


def test_model_with_an_early_exit_trains_and_resumes_exactly(tmp_path: Path) -> None:
    words = (
        *("PHASES.epochs=1", "~MODEL.width", "~MODEL.dropout"),
        f"MODEL.name={__name__}.EarlyExit",
    )
    train(tmp_path / "whole", *words)
    for kill in (2, 2):
        hooks = {"save": SaveEachStep(), "kill": KillAfter(kill)}
        run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []
