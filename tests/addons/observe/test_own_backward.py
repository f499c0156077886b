"""A forward pass that calls `backward()` is rejected before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phasetrain
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import ConfigError
from phasetrain.tasks.supervised import Supervised

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.argmax(1))


class Attack(Supervised):
    """Moves inputs by the sign of their gradient."""

    in_training = True
    in_tests = True

    def forward(self, batch: Batch) -> StepOutput:
        wanted = self.in_training if self.model.training else self.in_tests
        if wanted:
            with torch.enable_grad():
                inputs = batch.input.clone().requires_grad_()
                loss = self.loss(self.model(inputs), batch.target)
                moved = inputs + 0.1 * self.find_gradient(loss, inputs).sign()
            batch.input = moved.detach()
        return super().forward(batch)

    def find_gradient(self, loss: Tensor, inputs: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, inputs)
        return gradient


class Backward(Attack):
    def find_gradient(self, loss: Tensor, inputs: Tensor) -> Tensor:
        loss.backward()  # type: ignore[no-untyped-call]
        assert inputs.grad is not None
        return inputs.grad


class BackwardInTraining(Backward):
    in_tests = False


class BackwardInTests(Backward):
    in_training = False


class Steep(nn.Linear):
    """Adds the gradient of its input to the output."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = inputs.clone().requires_grad_()
            super().forward(inputs).sum().backward()
        return super().forward(inputs) + inputs.grad


def fit(folder: Path, model: nn.Module | None = None, **changes: Any) -> phasetrain.RunResult:
    torch.manual_seed(1)
    result: phasetrain.RunResult = phasetrain.fit(
        model or nn.Linear(4, 4),
        train=DATA,
        test=DATA,
        batch_size=16,
        epochs=1,
        loss="cross_entropy",
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        RUN={"dir": str(folder)},
        **changes,
    )
    return result


@pytest.mark.feature(
    "tasks.own_backward",
    "an error before the first step if a forward pass calls `backward()`",
    "`torch.autograd.grad(loss, inputs)`",
)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"TASK": {"name": f"{__name__}.BackwardInTraining"}}, "BackwardInTraining .* in train,"),
        ({"TASK": {"name": f"{__name__}.BackwardInTests"}}, "BackwardInTests .* in test,"),
        ({"model": Steep()}, "^MODEL: forward of Steep .* in train,"),
    ],
    ids=["training", "tests", "model"],
)
def test_backward_in_a_forward_pass_is_rejected(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with raises(ConfigError, code="task.own_backward") as caught:
        fit(tmp_path, **changes)
    assert caught.match(sentence)


def test_gradient_of_inputs_is_accepted(tmp_path: Path) -> None:
    fit(tmp_path, TASK={"name": f"{__name__}.Attack"})
