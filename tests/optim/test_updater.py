"""An update equals the hand-written one bit for bit, and goes on so after its state was loaded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from phasetrain.checkpoint.codec import decode, encode
from phasetrain.errors import ConfigError
from phasetrain.optim.updater import Updater

UPDATES = 6
Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def weights(net: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in net.state_dict().values()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(net: nn.Module, updater: Updater, numbers: range = range(UPDATES)) -> None:
    for number in numbers:
        inputs, targets = batch(number)
        updater.schedule(number / UPDATES)
        updater.backward(mse_loss(net(inputs), targets))
        updater.step()


def by_hand(net: nn.Module, optimizer: Optimizer, prepare: Callable[[int], None] = lambda number: None) -> None:
    for number in range(UPDATES):
        inputs, targets = batch(number)
        mse_loss(net(inputs), targets).backward()
        prepare(number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
class TestAgainstPlainTorch:
    def test_alone(self, make: Make) -> None:
        net, other = model(), model()
        run(net, Updater(make(net.parameters())))
        by_hand(other, make(other.parameters()))
        assert equal(weights(net), weights(other))
        assert not equal(weights(net), weights(model()))

    def test_with_a_schedule(self, make: Make) -> None:
        net, other = model(), model()
        run(net, Updater(make(net.parameters()), schedules={"lr": LinearParamScheduler(1.0, 0.0)}))
        optimizer = make(other.parameters())
        base = optimizer.param_groups[0]["lr"]

        def schedule(number: int) -> None:
            where = number / UPDATES
            optimizer.param_groups[0]["lr"] = base * (0.0 * where + 1.0 * (1 - where))

        by_hand(other, optimizer, schedule)
        assert equal(weights(net), weights(other))

    def test_with_clipping_of_the_norm(self, make: Make) -> None:
        net, other = model(), model()
        run(net, Updater(make(net.parameters()), clip_norm=0.1))
        by_hand(other, make(other.parameters()), lambda number: void(nn.utils.clip_grad_norm_(other.parameters(), 0.1)))
        assert equal(weights(net), weights(other))

    def test_with_clipping_of_values_and_then_the_norm(self, make: Make) -> None:
        net, other = model(), model()
        run(net, Updater(make(net.parameters()), clip_norm=0.1, clip_value=0.05))

        def clip(number: int) -> None:
            nn.utils.clip_grad_value_(other.parameters(), 0.05)
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)

        by_hand(other, make(other.parameters()), clip)
        assert equal(weights(net), weights(other))


def void(value: object) -> None:
    """Take a value and give none."""


class TestScaler:
    @staticmethod
    def updater(net: nn.Module, **options: Any) -> Updater:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return Updater(optimizer, scaler=GradScaler("cpu", init_scale=2.0**10, growth_interval=2), **options)

    @pytest.mark.parametrize("clip_norm", [None, 0.1])
    def test_it_equals_the_hand_written_loop(self, clip_norm: float | None) -> None:
        net, other = model(), model()
        updater = self.updater(net, clip_norm=clip_norm)
        run(net, updater)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number in range(UPDATES):
            inputs, targets = batch(number)
            scaler.scale(mse_loss(other(inputs), targets)).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(other.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert equal(weights(net), weights(other))
        assert updater.scaler is not None
        assert updater.scaler.get_scale() == scaler.get_scale() == 2.0**13

    @pytest.mark.parametrize("clip_norm", [None, 0.1])
    def test_an_overflow_skips_the_update_and_lowers_the_scale(self, clip_norm: float | None) -> None:
        net = model()
        updater = self.updater(net, clip_norm=clip_norm)
        before = weights(net)
        inputs, targets = batch(0)
        updater.backward(mse_loss(net(inputs), targets) * torch.tensor(1e38))
        updater.step()
        assert equal(weights(net), before)
        assert updater.scaler is not None
        assert updater.scaler.get_scale() == 2.0**9
        run(net, updater, range(1))
        assert not equal(weights(net), before)
        assert all(torch.isfinite(tensor).all() for tensor in weights(net))

    def test_half_precision_on_a_cpu(self) -> None:
        net = model()
        updater = self.updater(net)
        inputs, targets = batch(0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse_loss(net(inputs).float(), targets)
        updater.backward(loss)
        updater.step()
        assert not equal(weights(net), weights(model()))

    def test_its_state_is_saved(self) -> None:
        net, other = model(), model()
        one, two = self.updater(net), self.updater(other)
        run(net, one, range(3))
        other.load_state_dict(net.state_dict())
        two.load_state_dict(decode(*encode(one.state_dict())))
        run(net, one, range(3, UPDATES))
        run(other, two, range(3, UPDATES))
        assert one.state_dict()["scaler"] == two.state_dict()["scaler"]
        assert equal(weights(net), weights(other))


def test_shares_of_uneven_micro_batches_add_up_to_one_batch() -> None:
    net, other = model(), model()
    inputs, targets = batch(0)
    whole, parts = (Updater(torch.optim.SGD(n.parameters(), lr=0.1)) for n in (net, other))
    whole.backward(mse_loss(net(inputs), targets))
    for begin, end in ((0, 5), (5, 7), (7, 8)):
        parts.backward(mse_loss(other(inputs[begin:end]), targets[begin:end]), (end - begin) / 8)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=1e-7)
    whole.step()
    parts.step()
    assert all(parameter.grad is None for parameter in net.parameters())


class TestState:
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
    def test_going_on_from_a_checkpoint_gives_the_same_bits(self, make: Make) -> None:
        def updater(net: nn.Module) -> Updater:
            return Updater(make(net.parameters()), schedules={"lr": LinearParamScheduler(1.0, 0.0)})

        net, other = model(), model()
        run(net, one := updater(net), range(3))
        other.load_state_dict(net.state_dict())
        (two := updater(other)).load_state_dict(decode(*encode(one.state_dict())))
        run(net, one, range(3, UPDATES))
        run(other, two, range(3, UPDATES))
        assert equal(weights(net), weights(other))
        assert one.lr == two.lr < make([nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]

    def test_options_are_those_of_the_config_and_not_of_the_checkpoint(self) -> None:
        net = model()
        one = Updater(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4))
        run(net, one, range(1))
        two = Updater(torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.8))
        two.load_state_dict(one.state_dict())
        group = two.optimizer.param_groups[0]
        assert (two.lr, group["momentum"], group["weight_decay"]) == (0.5, 0.8, 0)
        assert len(two.optimizer.state) == 4

    def test_schedules_move_the_options_after_a_load(self) -> None:
        net = model()
        schedules = {"lr": LinearParamScheduler(1.0, 0.0), "momentum": LinearParamScheduler(1.0, 0.5)}
        updater = Updater(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8), schedules=schedules)
        run(net, updater, range(1))
        updater.load_state_dict(updater.state_dict())
        updater.schedule(0.5)
        assert updater.lr == pytest.approx(0.05)
        assert updater.optimizer.param_groups[0]["momentum"] == pytest.approx(0.6)

    def test_it_holds_no_options(self) -> None:
        updater = Updater(torch.optim.SGD(model().parameters(), lr=0.1))
        assert updater.state_dict() == {"optimizer": {}}


def test_every_group_is_scheduled_from_its_own_value() -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 1.0}, {"params": net[2].parameters(), "lr": 0.1}]
    updater = Updater(torch.optim.SGD(groups), schedules={"lr": LinearParamScheduler(1.0, 0.0)})
    updater.schedule(0.75)
    assert [group["lr"] for group in updater.optimizer.param_groups] == [0.25, pytest.approx(0.025)]
    assert len(updater.parameters) == 4


@pytest.mark.parametrize("option", ["momentun", "nesterov", "params", "betas"])
def test_an_option_that_is_no_number_is_refused(option: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^OPTIMIZER\.SCHEDULES\.{option}: the optimizer has no number of that name"
    ):
        Updater(torch.optim.SGD(model().parameters(), lr=0.1), schedules={option: LinearParamScheduler(1.0, 0.0)})
