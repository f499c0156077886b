"""Adapters change the output of their layers only as much as they have learned, and merge into the
weights."""

from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn

from phasetrain.addons.adapters.lora import LoRA
from phasetrain.errors import ConfigError
from phasetrain.models.adapters import (
    attach_adapters,
    list_adapted,
    list_base_parameters,
)
from phasetrain.runtime.machine import seed_of


class Net(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 5, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm1d(5)
        self.hidden = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.norm(self.conv(self.words(tokens).transpose(1, 2)))
        return self.head(torch.tanh(self.hidden(input=found.mean(2))))


TOKENS = torch.arange(20).reshape(2, 10) % 7
LAYERS = ["words", "conv", "hidden"]


def adapted(net: nn.Module, seed: int = 1, **section: Any) -> Any:
    attach_adapters(net, {"rank": 2, **section}, lambda name: seed_of(seed, name))
    return net.eval()


def moved(net: Any) -> Any:
    """Give all factors values, as training does."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in list_adapted(net).values():
            for weight in layer.adapter.parameters():
                weight.normal_(generator=generator)
    return net


class TestAttach:
    def test_training_starts_at_the_base_model(self) -> None:
        net = adapted(Net(), match=LAYERS)
        assert list(list_adapted(net)) == LAYERS
        assert torch.equal(net(TOKENS), Net().eval()(TOKENS))
        assert not torch.equal(moved(net)(TOKENS), Net().eval()(TOKENS))

    def test_initial_weights_depend_on_seed_and_name_alone(self) -> None:
        one = adapted(Net(), match="hidden").hidden.adapter.a
        torch.rand(3)
        assert torch.equal(one, adapted(Net(), match="*").hidden.adapter.a)
        assert not torch.equal(one, adapted(Net(), seed=2, match="*").hidden.adapter.a)

    def test_patterns_select_layers_with_matrices_that_are_not_trained_as_a_whole(self) -> None:
        section = {"match": "*", "train": ["head"]}
        net = adapted(Net(), **section)
        assert list(list_adapted(net)) == LAYERS
        base = list_base_parameters(net, section)
        assert {"words.weight", "norm.bias", "hidden.weight"} < base
        assert not {"head.weight", "hidden.adapter.a"} & base

    @pytest.mark.parametrize(
        ("section", "problem"),
        [
            ({"match": "hiden"}, {"code": "config.no_match", "suggestion": "hidden"}),
            ({"match": "norm"}, {"code": "config.no_match"}),
            ({"match": "*", "train": "tail"}, {"key": "MODEL.adapters.train"}),
            ({"match": "*", "rank": 0}, {"code": "config.rejected_by_part"}),
            ({"match": "*", "rank": 5000}, {"code": "config.rejected_by_part"}),
            ({"match": "*", "alpha": 0.0}, {"code": "config.rejected_by_part"}),
            ({"match": "*", "ranc": 2}, {"code": "config.unknown_parameter"}),
            ({"match": "*", "name": "lore"}, {"code": "config.unknown_part"}),
        ],
    )
    def test_wrong_section_is_rejected(
        self, section: dict[str, Any], problem: dict[str, str]
    ) -> None:
        with raises(ConfigError, **problem):
            adapted(Net(), **section)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.MultiheadAttention(4, 2).out_proj,
            nn.Conv2d(4, 4, 3, groups=2),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        ],
        ids=["output of attention", "groups", "circular padding"],
    )
    def test_layer_that_lora_does_not_fit_is_rejected(self, layer: nn.Module) -> None:
        with raises(ConfigError, code="config.rejected_by_part", key="MODEL.adapters"):
            adapted(nn.Sequential(layer), match="0")


class TestLoRA:
    def test_linear_layer_gets_the_scaled_product(self) -> None:
        layer = nn.Linear(2, 2, bias=False)
        lora = LoRA(layer, "x", torch.Generator(), rank=1, alpha=3.0)
        with torch.no_grad():
            lora.a.copy_(torch.tensor([[1.0, 2.0]]))
            lora.b.copy_(torch.tensor([[10.0], [100.0]]))
        output = lora(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 0.5]]))
        assert output.tolist() == [[90.5, 900.5]]
        assert lora.merge(torch.zeros(2, 2)).tolist() == [[30.0, 60.0], [300.0, 600.0]]

    @pytest.mark.parametrize(
        ("layer", "most"),
        [(nn.Linear(3, 5), 5), (nn.Conv2d(2, 4, 3), 18), (nn.Embedding(7, 2), 7)],
    )
    def test_rank_may_be_the_larger_dimension_of_the_weight(
        self, layer: nn.Module, most: int
    ) -> None:
        assert LoRA(layer, "x", torch.Generator(), rank=most).rank == most
        with pytest.raises(ValueError, match="x is a matrix"):
            LoRA(layer, "x", torch.Generator(), rank=most + 1)

    @pytest.mark.parametrize(("rslora", "scale"), [(False, 4.0), (True, 8.0)])
    def test_scale(self, rslora: bool, scale: float) -> None:
        lora = LoRA(nn.Linear(4, 4), "x", torch.Generator(), rank=4, alpha=16.0, rslora=rslora)
        assert lora.scale == scale

    def test_dropout_is_drawn_from_the_global_generator_in_training_only(self) -> None:
        net = moved(adapted(Net(), match="hidden", dropout=0.5))
        assert torch.equal(net(TOKENS), net(TOKENS))
        net.hidden.train()
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(net(TOKENS))
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])


@pytest.mark.addon("deploy")
class TestMerge:
    def merge(self, net: nn.Module) -> None:
        from phasetrain.addons.deploy.merge_adapters import merge_adapters

        merge_adapters(net, TOKENS)

    def test_merged_model_has_equal_outputs_and_the_names_of_the_base_model(self) -> None:
        net = moved(adapted(Net(), match=LAYERS))
        expected = net(TOKENS)
        self.merge(net)
        assert net.state_dict().keys() == Net().state_dict().keys()
        assert not any(module._forward_hooks for module in net.modules())
        torch.testing.assert_close(net(TOKENS), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.addon("text")
    def test_weight_that_is_used_in_two_places_cannot_be_merged(self) -> None:
        from phasetrain.addons.text.transformer import Transformer

        net = moved(adapted(Transformer(7, 10, width=8, depth=1, heads=2), match="tokens"))
        with raises(ConfigError, code="adapters.not_mergeable"):
            self.merge(net)
        assert list(list_adapted(net)) == ["tokens"]
