"""A rule that selects weights of model and loss by one name comes with a warning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import phasetrain

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS)


class Model(nn.Module):
    """Has a multiplier."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.multiplier = nn.Parameter(torch.ones(()))
        self.fixed = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.multiplier * self.layer(inputs)
        return output


class Loss(nn.Module):
    """Has a multiplier and another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplier = nn.Parameter(torch.ones(()))
        self.other = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.multiplier + self.other) * mse_loss(output, target)


DUAL = {"name": "sgd", "lr": 0.1}


@pytest.mark.feature(
    "optim.shared_names",
    "a warning if a rule selects a weight of the model and one of the loss by the same name",
    "`OPTIMIZER.others`, `OPTIMIZER.groups`",
)
@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"others": {"dual": {**DUAL, "match": "multiplier"}}}, "OPTIMIZER.others.dual.match"),
        ({"groups": [{"match": ["mult*"], "lr_scale": 2.0}]}, "OPTIMIZER.groups[0].match"),
        ({"groups": [{"match": "other", "lr_scale": 2.0}]}, None),
        ({"groups": [{"match": "*", "lr_scale": 2.0}]}, None),
        ({"groups": [{"match": "fixed", "lr_scale": 2.0}]}, None),
        ({"groups": [{"max_ndim": 0, "lr_scale": 2.0}]}, None),
    ],
)
def test_weights_of_model_and_loss_with_one_name_are_reported(
    options: dict[str, Any], key: str | None, tmp_path: Path
) -> None:
    phasetrain.fit(
        Model(),
        train=DATA,
        loss=Loss(),
        epochs=1,
        batch_size=16,
        OPTIMIZER={"name": "sgd", "lr": 0.1, **options},
        RUN={"dir": str(tmp_path)},
    )
    lines = (tmp_path / "log.txt").read_text().splitlines()
    lines = [line for line in lines if "which have the same name" in line]
    assert len(lines) == (key is not None)
    names = "multiplier of the model (Model) and multiplier of the loss (Loss)"
    assert all(f"{key} = " in line and names in line for line in lines)
