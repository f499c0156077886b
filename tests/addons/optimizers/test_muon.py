"""Muon updates hidden matrices, AdamW all other weights."""

from typing import Any

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.addons.optimizers.muon import Muon
from phasetrain.checkpoint.codec import decode, encode
from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError
from phasetrain.optim.groups import list_weights
from phasetrain.optim.optimizers import OPTIMIZERS
from phasetrain.optim.update.updater import Updater
from phasetrain.tasks.build.optimizer_factory import list_optimizer_specs

needs_muon = pytest.mark.skipif("Muon" not in vars(torch.optim), reason="needs torch 2.9")

SECTION = {"name": "muon", "lr": 0.01, "others": {}, "groups": [], "layer_decay": None}


class Net(nn.Module):
    """A convolution, an embedding, hidden layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv1d(1, 2, 3)
        self.words = nn.Embedding(5, 6)
        self.position_table = nn.Parameter(torch.randn(2, 6))
        self.hidden = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def loss(self, number: int) -> torch.Tensor:
        found = self.head(self.norm(self.hidden(self.words(torch.tensor([number % 5, 2])))))
        places = self.position_table.sum() + self.stem(torch.ones(1, 1, 4)).sum()
        return (found.sum(1) + places).square().sum()


def specs(net: nn.Module, **section: Any) -> Any:
    return list_optimizer_specs(AttrDict(SECTION | section), list_weights(net))


def names(net: nn.Module, **section: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group in specs(net, **section)[0].groups:
        mine = found.setdefault(group.options["algorithm"], [])
        mine += [weight.name for weight in group.weights]
    return found


def make(net: nn.Module, **params: Any) -> Any:
    groups = [group.to_param_group() for group in specs(net, **params)[0].groups]
    own = {key: value for key, value in params.items() if key != "groups"}
    return OPTIMIZERS.build("muon", {"params": groups, "lr": 0.01} | own)


class TestRouting:
    @pytest.mark.feature(
        "optimizer.muon",
        "Muon for hidden matrices with AdamW for all other weights, also with sharded state",
        "`OPTIMIZER.name=muon`",
    )
    def test_only_matrices_of_hidden_layers_go_to_muon(self) -> None:
        assert names(Net())["muon"] == ["hidden.weight"]

    @pytest.mark.addon("text")
    def test_tied_output_of_a_transformer_stays_an_embedding(self) -> None:
        from phasetrain.addons.text.transformer import Transformer

        found = names(Transformer(11, 4, width=8, depth=1, heads=2))
        assert found["muon"] == [
            "blocks.0.attention.projections.weight",
            "blocks.0.attention.out.weight",
            "blocks.0.feed_forward.inner.weight",
            "blocks.0.feed_forward.out.weight",
        ]
        assert {"tokens.weight", "positions.weight"} < set(found["adamw"])

    def test_rule_chooses_the_algorithm(self) -> None:
        rules = [
            {"match": "head.weight", "algorithm": "muon"},
            {"match": "hidden.*", "algorithm": "adamw", "lr_scale": 0.5},
        ]
        assert names(Net(), groups=rules)["muon"] == ["head.weight"]

    def test_scale_multiplies_all_learning_rates_of_adamw(self) -> None:
        rules = [{"match": "head.weight", "lr_scale": 3.0}]
        groups = specs(Net(), groups=rules, adamw_lr_scale=0.5)[0].groups
        assert [(group.options.get("lr"), len(group.weights)) for group in groups] == [
            (None, 1),
            (0.005, 8),
            (0.015, 1),
        ]

    @pytest.mark.parametrize(
        ("net", "rules", "problem"),
        [
            (nn.Conv2d(1, 1, 3), [], {"code": "optimizer.no_matrices", "key": "OPTIMIZER.name"}),
            (Net(), [{"match": "stem.*", "algorithm": "muon"}], {"key": "OPTIMIZER.groups"}),
            (Net(), [{"match": "head.*", "algorithm": "sgd"}], {"key": "OPTIMIZER.groups"}),
        ],
        ids=["no matrices", "convolution", "unknown algorithm"],
    )
    def test_impossible_choice_is_rejected(
        self, net: nn.Module, rules: list[dict[str, Any]], problem: dict[str, str]
    ) -> None:
        with raises(ConfigError, **problem):
            specs(net, groups=rules)

    def test_momentum_of_one_is_rejected(self) -> None:
        with raises(ConfigError, code="config.rejected_by_part", key="OPTIMIZER"):
            make(Net(), momentum=1.0)

    def test_torch_without_muon_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.optim, "Muon", raising=False)
        with raises(ConfigError, code="config.rejected_by_part", key="OPTIMIZER") as caught:
            make(Net())
        assert "2.9" in str(caught.value)


@needs_muon
class TestAgainstTorch:
    @pytest.mark.feature("optimizer.muon")
    def test_updates_are_those_of_torchs_muon_and_adamw(self) -> None:
        net, other = Net(), Net()
        one = make(net, adamw_lr_scale=0.5)
        muon = torch.optim.Muon(
            [other.hidden.weight], lr=0.01, adjust_lr_fn="match_rms_adamw", weight_decay=0.1
        )
        rest = [weight for weight in other.parameters() if weight is not other.hidden.weight]
        adamw = torch.optim.AdamW(rest, lr=0.005, weight_decay=0.1, fused=True)
        for number in range(3):
            net.loss(number).backward()
            one.step()
            one.zero_grad()
            other.loss(number).backward()
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
        for mine, expected in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, expected)
        assert not torch.equal(net.hidden.weight, Net().hidden.weight)

    def test_groups_of_one_rank_may_be_empty(self) -> None:
        groups = [{"params": [], "algorithm": "muon"}, {"params": [nn.Parameter(torch.ones(2))]}]
        groups[1]["algorithm"] = "adamw"
        made = Muon(groups, lr=0.1)
        assert [len(group["params"]) for group in made.param_groups] == [0, 1]
        assert made.defaults["momentum"] == 0.95


@needs_muon
def test_resume_from_a_checkpoint_is_bit_identical() -> None:
    net, other = Net(), Net()
    one, two = Updater(make(net)), Updater(make(other))

    def run(mine: Net, updater: Updater, numbers: range) -> None:
        for number in numbers:
            updater.backward(mine.loss(number))
            updater.step()

    run(net, one, range(3))
    other.load_state_dict(net.state_dict())
    two.load_state_dict(decode(*encode(one.state_dict())))
    for mine, updater in ((net, one), (other, two)):
        run(mine, updater, range(3, 6))
    for mine, expected in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine, expected)
