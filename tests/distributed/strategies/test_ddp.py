"""DDP around what trains, and nothing else."""

import warnings
from typing import Any

import pytest
import torch
from forked import together
from raising import raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phasetrain.distributed import World
from phasetrain.distributed.strategies import DataParallel, ddp
from phasetrain.errors import ConfigError
from phasetrain.tasks.shape_errors import raise_if_unused


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


@pytest.mark.feature(
    "45", "gradients synchronized only in the last micro-batch", "`OPTIMIZER.accumulate`"
)
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


def test_unused_parameters_are_named(world: World) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1)})
    model.forward = lambda inputs: model["used"](inputs)  # type: ignore[method-assign]
    wrapped = DataParallel(world).wrap_module(model, optimizer(model))
    wrapped(torch.zeros(1, 2)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        wrapped(torch.zeros(1, 2))
    with raises(
        ConfigError,
        code="distributed.unused_parameters",
        key="DISTRIBUTED.find_unused_parameters",
    ) as explained:
        raise_if_unused(model, caught.value)
    assert "spare.weight, spare.bias;" in str(explained.value)
    raise_if_unused(model, RuntimeError("another one"))


class OlderDDP(DistributedDataParallel):
    """DDP with the arguments that it had before torch 2.13."""

    def __init__(
        self, module: nn.Module, *, broadcast_buffers: bool = True, **options: Any
    ) -> None:
        if "forward_sync_buffers" in options:
            raise TypeError("got an unexpected keyword argument 'forward_sync_buffers'")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(module, broadcast_buffers=broadcast_buffers, **options)


def buffers_of_second_rank(world: World) -> list[list[float]]:
    """Return the buffer of rank 1 after wrapping, and after a forward pass of a changed one."""
    found = []
    for version in (DistributedDataParallel, OlderDDP):
        for sync in (True, False):
            model = nn.Linear(1, 1)
            model.register_buffer("mean", torch.tensor([1.0 + world.rank]))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ddp, "DistributedDataParallel", version)
                strategy = DataParallel(world, sync_buffers=sync)
                wrapped = strategy.wrap_module(model, optimizer(model))
            values = [float(model.mean)]
            model.mean.fill_(3.0 + world.rank)
            wrapped(torch.ones(1, 1))
            found.append([*values, float(model.mean)])
    return found


@pytest.mark.feature("versions")
def test_buffers_are_synchronized_alike_in_every_version_of_torch() -> None:
    with_sync, without = [1.0, 3.0], [1.0, 4.0]
    assert together(2, buffers_of_second_rank)[1] == [with_sync, without] * 2
