"""Outputs and gradients of adapters equal those of PEFT."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from phasetrain.models.adapters import attach_adapters, list_adapted

pytestmark = pytest.mark.slow

LAYERS = {
    "linear": (nn.Linear(6, 5), torch.linspace(-1, 1, 12).reshape(2, 6)),
    "conv1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), torch.linspace(-1, 1, 48).reshape(2, 3, 8)),
    "conv2d": (nn.Conv2d(2, 4, 3, padding=2), torch.linspace(-1, 1, 100).reshape(2, 2, 5, 5)),
    "embedding": (nn.Embedding(7, 4), torch.arange(6).reshape(2, 3)),
}


class Net(nn.Module):
    """One layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: torch.Tensor) -> Any:
        return self.layer(value)


def compare(make: Any, value: torch.Tensor, rslora: bool, transposed: bool = False) -> None:
    peft = pytest.importorskip("peft")
    mine = Net(make())
    attach_adapters(mine, {"match": "layer", "rank": 2, "alpha": 5, "rslora": rslora}, hash)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=5,
        lora_dropout=0.0,
        target_modules=["layer"],
        use_rslora=rslora,
        fan_in_fan_out=transposed,
    )
    other = peft.get_peft_model(Net(make()), config)
    adapter: Any = list_adapted(mine)["layer"].get_submodule("adapter")
    generator = torch.Generator().manual_seed(5)
    theirs = [weight for name, weight in other.named_parameters() if "lora_" in name]
    assert [weight.shape for weight in theirs] == [adapter.a.shape, adapter.b.shape]
    for one, two in zip((adapter.a, adapter.b), theirs, strict=True):
        one.data.normal_(generator=generator)
        two.data.copy_(one.data)
    found, expected = mine(value), other(value)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, two in zip((adapter.a, adapter.b), theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.feature("model.adapters")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_layer_computes_what_peft_computes(kind: str, rslora: bool) -> None:
    layer, value = LAYERS[kind]
    compare(lambda: deepcopy(layer), value, rslora)


def test_transposed_linear_layer_of_transformers() -> None:
    library = pytest.importorskip("transformers.pytorch_utils")
    layer = library.Conv1D(5, 6)
    compare(lambda: deepcopy(layer), torch.linspace(-1, 1, 12).reshape(2, 6), False, True)
