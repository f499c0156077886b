"""An optimizer within another one: what goes in reaches it, and its state is that of an optimizer
without shards."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.addons.sharding.sharded_ddp import ShardedDataParallel
from phasetrain.addons.sharding.zero import Zero
from phasetrain.distributed import Strategy, World
from phasetrain.testing import differences

KINDS = [Zero, ShardedDataParallel]


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def updated(network: nn.Module, optimizer: Optimizer, updates: int) -> list[Tensor]:
    """Make some updates, each with a learning rate of its own, and return the weights."""
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + update)
        optimizer.zero_grad()
        network(torch.full((2, 3), 1.0 + update)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in network.parameters()]


@pytest.mark.parametrize("kind", KINDS)
class TestShardedOptimizerState:
    def made(
        self, world: World, kind: type[Zero | ShardedDataParallel]
    ) -> tuple[Strategy, nn.Module, Optimizer]:
        strategy, network = kind(world), model()
        return (
            strategy,
            network,
            strategy.make_optimizer(adamw, [{"params": list(network.parameters())}]),
        )

    def test_updates_state_and_options_are_those_of_the_optimizer_alone(
        self, world: World, kind: type[Zero | ShardedDataParallel]
    ) -> None:
        strategy, network, optimizer = self.made(world, kind)
        plain = model()
        alone = adamw(list(plain.parameters()))
        assert differences(updated(plain, alone, 4), updated(network, optimizer, 4)) == []
        assert (
            differences(
                Strategy(world).state.optimizer_state(alone),
                strategy.state.optimizer_state(optimizer),
            )
            == []
        )
        assert optimizer.defaults == alone.defaults
        assert optimizer.param_groups[0].keys() == alone.param_groups[0].keys()
        assert set(strategy.state.parameter_state(optimizer)) == set(network.parameters())

    def test_goes_on_from_the_state_of_an_optimizer_alone(
        self, world: World, kind: type[Zero | ShardedDataParallel]
    ) -> None:
        plain = model()
        alone = adamw(list(plain.parameters()))
        updated(plain, alone, 2)
        state = deepcopy(
            Strategy(world).state.optimizer_state(alone)
        )  # torch takes tensors over as they are
        strategy, network, optimizer = self.made(world, kind)
        network.load_state_dict(plain.state_dict())
        strategy.state.load_optimizer_state(
            optimizer, {str(number): kept for number, kept in state.items()}
        )
        assert differences(updated(plain, alone, 3), updated(network, optimizer, 3)) == []
        assert (
            differences(
                Strategy(world).state.optimizer_state(alone),
                strategy.state.optimizer_state(optimizer),
            )
            == []
        )

    def test_without_the_state_it_would_not(
        self, world: World, kind: type[Zero | ShardedDataParallel]
    ) -> None:
        plain = model()
        alone = adamw(list(plain.parameters()))
        updated(plain, alone, 2)
        _, network, optimizer = self.made(world, kind)
        network.load_state_dict(plain.state_dict())
        assert differences(updated(plain, alone, 3), updated(network, optimizer, 3)) != []

    def test_groups_keep_their_options(
        self, world: World, kind: type[Zero | ShardedDataParallel]
    ) -> None:
        def groups(network: nn.Module) -> Any:
            weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
            others = [parameter for parameter in network.parameters() if parameter.ndim == 1]
            return [
                {"params": others, "weight_decay": 0.0},
                {"params": weights, "betas": (0.5, 0.9)},
            ]

        plain, network, strategy = model(), model(), kind(world)
        alone, optimizer = adamw(groups(plain)), strategy.make_optimizer(adamw, groups(network))
        assert differences(updated(plain, alone, 4), updated(network, optimizer, 4)) == []
        assert (
            differences(
                Strategy(world).state.optimizer_state(alone),
                strategy.state.optimizer_state(optimizer),
            )
            == []
        )
        options = [(group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
        assert options == [(0.0, (0.9, 0.999)), (0.01, (0.5, 0.9))]

    def test_parameters_of_several_types_are_refused(
        self, world: World, kind: type[Zero | ShardedDataParallel]
    ) -> None:
        mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
        with pytest.raises(ValueError, match=r"\(bfloat16, float32\)"):
            kind(world).make_optimizer(adamw, [{"params": mixed}])


@pytest.mark.parametrize("as_view", [False, True])
def test_parameters_may_lie_in_one_buffer(world: World, as_view: bool) -> None:
    strategy, network, plain = Zero(world, parameters_as_bucket_view=as_view), model(), model()
    optimizer = strategy.make_optimizer(adamw, [{"params": list(network.parameters())}])
    places = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    assert len(places) == (1 if as_view else 4)
    assert (
        differences(
            updated(plain, adamw(list(plain.parameters())), 3), updated(network, optimizer, 3)
        )
        == []
    )
