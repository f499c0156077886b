"""Fairscale's ShardedDataParallel, and what it needs around it."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from phasetrain.addons.sharding.sharded_ddp import ShardedDataParallel
from phasetrain.distributed import World
from phasetrain.optim import GuardSettings, Updater
from phasetrain.optim.update.gradients import GradientSettings


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return self.weight * output.sum()


def test_one_wrapper_sees_to_model_and_loss(world: World) -> None:
    strategy, model, loss = ShardedDataParallel(world), nn.Linear(2, 1), Scaled()
    optimizer = strategy.make_optimizer(
        sgd, [{"params": [*model.parameters(), *loss.parameters()]}]
    )
    wrapped = strategy.wrap_module(model, optimizer)
    assert wrapped is not model
    assert strategy.wrap_module(loss, optimizer) is loss
    with strategy.micro_batch(last=True):
        loss(wrapped(torch.ones(1, 2))).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
    assert loss.weight.grad is not None
    assert loss.weight.grad.item() == model(torch.ones(1, 2)).item()


def test_a_loss_alone_may_train(world: World) -> None:
    strategy, model, loss = (
        ShardedDataParallel(world),
        nn.Linear(2, 1).requires_grad_(False),
        Scaled(),
    )
    optimizer = strategy.make_optimizer(sgd, [{"params": list(loss.parameters())}])
    assert strategy.wrap_module(model, optimizer) is model
    assert strategy.wrap_module(loss, optimizer) is not loss


def test_gradients_of_micro_batches_add_up(world: World) -> None:
    strategy, model = ShardedDataParallel(world), nn.Linear(2, 1)
    wrapped = strategy.wrap_module(
        model, strategy.make_optimizer(sgd, [{"params": list(model.parameters())}])
    )
    for last in (False, False, True):
        with strategy.micro_batch(last=last):
            wrapped(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[3.0, 3.0]]


def test_the_norm_has_the_bits_of_torch_and_leaves_out_what_has_no_gradient(world: World) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n)) for n in (7, 300, 1, 65)]
    strategy = ShardedDataParallel(world)
    strategy.make_optimizer(sgd, [{"params": parameters}])
    for parameter in parameters[:1] + parameters[2:]:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert torch.equal(strategy.gradient_norm(gradients), get_total_norm(gradients))


def test_a_process_without_any_gradient_has_the_norm_of_the_others(world: World) -> None:
    strategy = ShardedDataParallel(world)
    strategy.make_optimizer(sgd, [{"params": [nn.Parameter(torch.ones(2))]}])
    assert strategy.gradient_norm([]).item() == 0.0


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_what_is_not_finite_is_left_out(world: World, clip_norm: float | None) -> None:
    strategy, model = ShardedDataParallel(world), nn.Linear(2, 1, bias=False)
    optimizer = strategy.make_optimizer(sgd, [{"params": list(model.parameters())}])
    wrapped = strategy.wrap_module(model, optimizer)
    updater = Updater(
        optimizer,
        gradients=GradientSettings(clip_norm=clip_norm),
        guard=GuardSettings("skip", names=["weight"]),
        strategy=strategy,
    )
    before = model.weight.detach().clone()
    for scale in (torch.inf, 1.0):
        with strategy.micro_batch(last=True):
            updater.backward(
                (wrapped(torch.ones(1, 2)) * 0.0 * scale + wrapped(torch.ones(1, 2))).sum(),
                last=True,
            )
        updater.step()
        assert torch.equal(model.weight.detach(), before) is (scale == torch.inf)
    assert updater.guard.skipped == 1


def test_buckets_are_off_and_the_log_of_the_process_is_left_alone(world: World) -> None:
    handlers = list(logging.getLogger().handlers)
    strategy, model = ShardedDataParallel(world), nn.Linear(2, 1)
    strategy.wrap_module(
        model, strategy.make_optimizer(sgd, [{"params": list(model.parameters())}])
    )
    assert strategy.bucket_entries == 0
    assert logging.getLogger().handlers == handlers
