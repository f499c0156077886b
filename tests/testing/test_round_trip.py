"""The check of states passes parts that say all they hold, and finds those that hide or lose
something."""

from typing import Any

import planted_parts
import pytest
import torch
from torch import nn

from phasetrain.engine.batch import StepOutput
from phasetrain.meters import METERS
from phasetrain.testing import assert_state_round_trip

IMAGES, LABELS = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), torch.arange(8)


def output() -> StepOutput:
    return StepOutput(torch.rand(()), 8.0, 8, torch.randn(8, 10), LABELS, ids=torch.arange(8))


def test_a_meter_passes() -> None:
    assert_state_round_trip(METERS.build("accuracy"), lambda meter: meter.update(output()))


def test_a_model_with_dropout_and_batch_norm_passes() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    assert_state_round_trip(model, lambda model: model(IMAGES))


def test_parts_that_belong_together_pass() -> None:
    model = nn.Linear(64, 10)
    parts = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), weight_decay=0.1)}

    def step(parts: Any) -> float:
        parts["optimizer"].zero_grad()
        loss = nn.functional.cross_entropy(parts["model"](IMAGES), LABELS)
        loss.backward()
        parts["optimizer"].step()
        return float(loss.detach())

    assert_state_round_trip(parts, step)


def test_fresh_part_may_be_given() -> None:
    generator = torch.Generator()
    model = nn.Linear(64, 10)
    model.generator = generator  # cannot be told apart by a copy
    assert_state_round_trip(model, lambda model: model(IMAGES), fresh=lambda: nn.Linear(64, 10))


class Holds:
    def __init__(self, value: Any, loads: Any = None) -> None:
        self.value, self.loads = value, loads

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"] if self.loads is None else self.loads


def test_state_is_compared_before_any_step() -> None:
    assert_state_round_trip(Holds([float("nan"), -0.0, (1, None), {2: torch.zeros(0)}]))


@pytest.mark.parametrize(
    ("part", "step", "message"),
    [
        (
            planted_parts.ForgetfulMeter(),
            lambda meter: (meter.update(output()), meter.compute())[1],
            "a Python number.*: result",
        ),
        (
            planted_parts.DeafMeter(),
            lambda meter: meter.update(output()),
            "has another one .*does not restore.*: count",
        ),
        (
            planted_parts.MovingLoss(),
            lambda loss: loss(output().output, LABELS),
            "after 1 more steps .*: result",
        ),
        (
            planted_parts.CountingModel(10),
            lambda model: model(IMAGES),
            "after 1 more steps .*: result",
        ),
        (Holds(object()), None, r"cannot be saved: value: builtins\.object"),
        (
            Holds(0.0),
            lambda part: (
                setattr(part, "value", part.value + torch.rand(())) or setattr(part, "loads", 1)
            ),
            "value",
        ),
    ],
    ids=["meter", "deaf", "loss", "model", "object", "loads"],
)
def test_hidden_or_lost_state_is_reported(part: Any, step: Any, message: str) -> None:
    if isinstance(part, Holds) and step is not None:
        part.loads = 1
    with pytest.raises(AssertionError, match=message):
        assert_state_round_trip(part, step)


def test_unseeded_generator_is_reported() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = iter(range(100))

        def __deepcopy__(self, memo: Any) -> "Noisy":
            return Noisy()

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch + torch.randn(
                (), generator=torch.Generator().manual_seed(next(self.seeds))
            )

    with pytest.raises(AssertionError, match="generator"):
        assert_state_round_trip(Noisy(), lambda part: part(IMAGES))
