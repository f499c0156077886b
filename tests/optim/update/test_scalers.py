"""Gradient scalers work on the device of the run, a CPU included."""

import pytest
import torch

from phasetrain.optim.update.scalers import SCALERS

CPU = torch.device("cpu")


def test_scaler_none_is_no_scaler() -> None:
    assert SCALERS.build("none") is None


@pytest.mark.feature("61")
def test_grad_scaler_is_enabled_on_the_cpu() -> None:
    scaler = SCALERS.build("grad", {"init_scale": 8.0, "growth_interval": 3}, facts={"device": CPU})
    assert scaler is not None
    assert scaler.is_enabled()
    assert scaler.scale(torch.tensor(2.0)).item() == 16.0
    assert scaler.get_growth_interval() == 3


@pytest.mark.parametrize(("shards", "name"), [(False, "GradScaler"), (True, "ShardedGradScaler")])
def test_grad_scaler_asks_other_ranks_if_gradients_are_sharded(shards: bool, name: str) -> None:
    scaler = SCALERS.build("grad", {"init_scale": 8.0}, facts={"device": CPU, "shards": shards})
    assert type(scaler).__name__ == name
    assert scaler is not None
    assert scaler.scale(torch.tensor(2.0)).item() == 16.0


@pytest.mark.parametrize(
    ("precision", "scaled"), [("fp16", True), ("bf16", False), ("fp32", False)]
)
def test_auto_scales_fp16_only(precision: str, scaled: bool) -> None:
    scaler = SCALERS.build("auto", facts={"device": CPU, "precision": precision})
    assert (scaler is not None) is scaled
    assert scaler is None or scaler.get_scale() == 65536.0
