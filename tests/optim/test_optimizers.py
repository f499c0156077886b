"""Built-in optimizers use the fused kernels of PyTorch, whose optimizers go by class name."""

import pytest
import torch
from torch import nn

from phasetrain.errors import ConfigError
from phasetrain.optim.optimizers import OPTIMIZERS, fusable


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
    ],
)
def test_built_in_optimizers_have_these_defaults(
    name: str, kind: type, options: dict[str, object]
) -> None:
    made = OPTIMIZERS.build(name, {"params": parameters(), "lr": 0.5})
    assert type(made) is kind
    group = made.param_groups[0]
    assert {key: group[key] for key in options} == options
    assert (group["lr"], group["fused"]) == (0.5, True)


def test_lists_and_integers_of_a_config_are_converted() -> None:
    made = OPTIMIZERS.build(
        "adamw", {"params": parameters(), "lr": 1, "betas": [0.8, 0.9], "eps": 1e-6}
    )
    assert made.param_groups[0]["betas"] == (0.8, 0.9)


def test_torch_optimizer_is_found_by_class_name() -> None:
    made = OPTIMIZERS.build("RMSprop", {"params": parameters(), "lr": 0.1, "alpha": 0.5})
    assert type(made) is torch.optim.RMSprop
    assert made.param_groups[0]["alpha"] == 0.5


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("smgd", {}, r"OPTIMIZER\.name = 'smgd': .*'sgd'"),
        ("Optimizer", {}, r"OPTIMIZER\.name = 'Optimizer':"),
        (
            "sgd",
            {"momentun": 0.9},
            r"OPTIMIZER\.momentun: .*'momentum'",
        ),
        ("sgd", {"momentum": 1.5}, r"OPTIMIZER \(optimizer 'sgd'\): momentum = 1\.5"),
        ("adam", {"lr": -1.0}, r"OPTIMIZER \(optimizer 'adam'\): .*-1\.0"),
    ],
)
def test_bad_names_and_parameters_are_rejected(
    name: str, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS.build(name, {"params": parameters(), "lr": 0.1} | params)


@pytest.mark.parametrize(
    ("name", "params", "scaled", "fused"),
    [
        ("sgd", {}, False, True),
        ("SGD", {}, True, False),
        ("sgd", {}, True, False),
        ("adamw", {}, True, True),
        ("Adam", {"foreach": True}, False, False),
        ("Adam", {"differentiable": False}, False, False),
    ],
)
def test_fused_kernel_is_used_if_the_parameters_allow_it(
    name: str, params: dict[str, object], scaled: bool, fused: bool
) -> None:
    assert fusable(name, params, scaled=scaled) is fused
