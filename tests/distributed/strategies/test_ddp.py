"""DDP around what trains, and nothing else."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phasetrain.distributed import World
from phasetrain.distributed.strategies import DataParallel


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_trains_is_wrapped_and_keeps_its_state(world: World) -> None:
    strategy, model = DataParallel(world), nn.Linear(2, 1)
    wrapped = strategy.wrap_module(model, optimizer(model))
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.module is model
    assert list(strategy.state.model_state(model)) == ["weight", "bias"]


def test_what_trains_nothing_is_not(world: World) -> None:
    loss = nn.CrossEntropyLoss()
    assert DataParallel(world).wrap_module(loss, optimizer(nn.Linear(1, 1))) is loss


@pytest.mark.parametrize(("last", "syncs"), [(True, True), (False, False)])
def test_gradients_go_round_in_the_last_micro_batch(world: World, last: bool, syncs: bool) -> None:
    strategy, model = DataParallel(world), nn.Linear(2, 1)
    wrapped = strategy.wrap_module(model, optimizer(model))
    assert isinstance(wrapped, DistributedDataParallel)
    with strategy.micro_batch(last=last):
        assert wrapped.require_backward_grad_sync is syncs


def test_buckets_have_a_size(world: World) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb = 0"):
        DataParallel(world, bucket_cap_mb=0)
