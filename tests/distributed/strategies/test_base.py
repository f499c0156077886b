"""What holds for one process, and the parts of which strategies are made."""

import pytest
import torch
from torch import nn

from phasetrain.distributed import STRATEGIES, AsyncMean, Strategy, World
from phasetrain.distributed.strategies.base import device_of, is_trainable, sum_losses


def test_the_names() -> None:
    assert {"none", "ddp"} <= set(STRATEGIES)
    assert type(STRATEGIES.build("none", {}, facts={"world": World()})) is Strategy


class TestOneProcess:
    def test_nothing_is_wrapped_and_nothing_is_asked_of_others(self) -> None:
        strategy, model = Strategy(World()), nn.Linear(2, 1)
        optimizer = strategy.make_optimizer(
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            [{"params": list(model.parameters())}],
        )
        assert strategy.wrap_module(model, optimizer) is model
        assert (
            strategy.averages_gradients,
            strategy.shards_optimizer,
            strategy.has_global_loss,
            strategy.needs_warmup,
        ) == (False,) * 4
        assert strategy.any_rank(flag := torch.ones(())) is flag
        assert strategy.seed_key(3) == (0, 3)
        assert strategy.mean_loss([torch.tensor(1.0), torch.tensor(2.5)]).wait().item() == 3.5

    def test_the_norm_is_that_of_all_gradients_together(self) -> None:
        assert (
            Strategy(World())
            .gradient_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
            .item()
            == 5.0
        )

    def test_state_of_an_optimizer_goes_by_number(self) -> None:
        strategy, model = Strategy(World()), nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = strategy.state.optimizer_state(optimizer)
        assert state[0]["momentum_buffer"].tolist() == [[1.0, 1.0]]
        assert strategy.state.parameter_state(optimizer)[model.weight][
            "momentum_buffer"
        ].tolist() == [[1.0, 1.0]]
        other = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.7, momentum=0.9)
        strategy.state.load_optimizer_state(other, state)
        assert strategy.state.optimizer_state(other)[0]["momentum_buffer"].tolist() == [[1.0, 1.0]]
        assert other.param_groups[0]["lr"] == 0.7


def test_losses_are_added_in_their_order() -> None:
    tiny = 2.0**-24  # in float32 half of the distance from 1 to the next number
    assert (
        sum_losses([torch.tensor(tiny), torch.tensor(tiny), torch.tensor(1.0)]).item()
        == 1.0 + 2.0**-23
    )
    assert sum_losses([torch.tensor(1.0), torch.tensor(tiny), torch.tensor(tiny)]).item() == 1.0


def test_a_mean_of_one_process_is_its_value() -> None:
    assert AsyncMean(torch.tensor(2.0)).wait().item() == 2.0


@pytest.mark.parametrize(("asks", "expected"), [(True, True), (False, False)])
def test_what_trains(asks: bool, expected: bool) -> None:
    assert is_trainable(nn.Linear(1, 1).requires_grad_(asks)) is expected


def test_a_module_without_parameters_trains_nothing_and_is_on_the_cpu() -> None:
    assert not is_trainable(nn.ReLU())
    assert device_of(nn.ReLU()) == torch.device("cpu")
