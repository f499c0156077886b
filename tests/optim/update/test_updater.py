"""An update equals the hand-written one bit for bit, and goes on so after its state was loaded."""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler
from raising import raises
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from updating import UPDATES, batch, equal, run, weights

from phasetrain.checkpoint.codec import decode, encode
from phasetrain.errors import ConfigError, NumericsError
from phasetrain.optim import GradientSettings, Schedules
from phasetrain.optim.schedules.param_schedules import ParamSchedules, StageOptions
from phasetrain.optim.update.nonfinite import GuardSettings, NonFinite
from phasetrain.optim.update.updater import Updater

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
GATED: dict[str, Make] = {
    "sgd": OPTIMIZERS["sgd"],
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": OPTIMIZERS["adamw"],
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def by_hand(
    net: nn.Module, optimizer: Optimizer, prepare: Callable[[int], None] = lambda number: None
) -> None:
    for number in range(UPDATES):
        inputs, targets = batch(number)
        mse_loss(net(inputs), targets).backward()
        prepare(number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
class TestAgainstPlainTorch:
    def test_updates_equal_plain_torch(self, make: Make) -> None:
        net, other = model(), model()
        run(net, Updater(make(net.parameters())))
        by_hand(other, make(other.parameters()))
        assert equal(weights(net), weights(other))
        assert not equal(weights(net), weights(model()))

    def test_scheduled_updates_equal_plain_torch(self, make: Make) -> None:
        net, other = model(), model()
        run(
            net,
            Updater(
                make(net.parameters()), schedules=Schedules({"lr": LinearParamScheduler(1.0, 0.0)})
            ),
        )
        optimizer = make(other.parameters())
        base = optimizer.param_groups[0]["lr"]

        def schedule(number: int) -> None:
            where = number / UPDATES
            optimizer.param_groups[0]["lr"] = base * (0.0 * where + 1.0 * (1 - where))

        by_hand(other, optimizer, schedule)
        assert equal(weights(net), weights(other))

    def test_clipping_of_the_norm_equals_plain_torch(self, make: Make) -> None:
        net, other = model(), model()
        run(net, Updater(make(net.parameters()), gradients=GradientSettings(clip_norm=0.1)))
        by_hand(
            other,
            make(other.parameters()),
            lambda number: void(nn.utils.clip_grad_norm_(other.parameters(), 0.1)),
        )
        assert equal(weights(net), weights(other))

    def test_clipping_of_values_precedes_clipping_of_the_norm(self, make: Make) -> None:
        net, other = model(), model()
        run(
            net,
            Updater(
                make(net.parameters()), gradients=GradientSettings(clip_norm=0.1, clip_value=0.05)
            ),
        )

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
        return Updater(
            optimizer, scaler=GradScaler("cpu", init_scale=2.0**10, growth_interval=2), **options
        )

    @pytest.mark.parametrize("clip_norm", [None, 0.1])
    def test_scaled_updates_equal_a_plain_loop(self, clip_norm: float | None) -> None:
        net, other = model(), model()
        updater = self.updater(net, gradients=GradientSettings(clip_norm=clip_norm))
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
    def test_overflow_skips_the_update_and_lowers_the_scale(self, clip_norm: float | None) -> None:
        net = model()
        updater = self.updater(net, gradients=GradientSettings(clip_norm=clip_norm))
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

    def test_half_precision_trains_on_the_cpu(self) -> None:
        net = model()
        updater = self.updater(net)
        inputs, targets = batch(0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse_loss(net(inputs).float(), targets)
        updater.backward(loss)
        updater.step()
        assert not equal(weights(net), weights(model()))

    def test_state_of_the_scaler_is_saved(self) -> None:
        net, other = model(), model()
        one, two = self.updater(net), self.updater(other)
        run(net, one, range(3))
        other.load_state_dict(net.state_dict())
        two.load_state_dict(decode(*encode(one.state_dict())))
        run(net, one, range(3, UPDATES))
        run(other, two, range(3, UPDATES))
        assert one.state_dict()["scaler"] == two.state_dict()["scaler"]
        assert equal(weights(net), weights(other))


def test_uneven_micro_batches_add_up_to_one_batch() -> None:
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
    def test_resume_from_a_checkpoint_is_bit_identical(self, make: Make) -> None:
        def updater(net: nn.Module) -> Updater:
            return Updater(
                make(net.parameters()), schedules=Schedules({"lr": LinearParamScheduler(1.0, 0.0)})
            )

        net, other = model(), model()
        run(net, one := updater(net), range(3))
        other.load_state_dict(net.state_dict())
        (two := updater(other)).load_state_dict(decode(*encode(one.state_dict())))
        run(net, one, range(3, UPDATES))
        run(other, two, range(3, UPDATES))
        assert equal(weights(net), weights(other))
        assert one.lr == two.lr < make([nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]

    def test_loaded_state_keeps_no_larger_memory_alive(self) -> None:
        net = model()
        run(net, one := Updater(torch.optim.Adam(net.parameters())), range(2))
        # The tensors of this state are views of the content of one file.
        saved = decode(*encode(one.state_dict()))
        own = saved["optimizer"][0]["exp_avg"].clone()
        saved["optimizer"][0]["exp_avg"] = own
        two = Updater(torch.optim.Adam(net.parameters()))
        two.load_state_dict(saved)
        states = two.optimizer.state
        for state in states.values():
            assert all(one.untyped_storage().nbytes() == one.nbytes for one in state.values())
        assert states[next(net.parameters())]["exp_avg"] is own

    def test_layout_of_its_tensors_is_restored(self) -> None:
        one, two = (Updater(torch.optim.SGD(model().parameters(), lr=0.1)) for _ in range(2))
        weight = one.optimizer.param_groups[0]["params"][0]
        one.optimizer.state[weight]["basis"] = torch.arange(20.0).view(5, 4).T
        two.load_state_dict(decode(*encode(one.state_dict())))
        (state,) = two.optimizer.state.values()
        assert state["basis"].stride() == (1, 4)

    def test_options_come_from_the_config_and_not_from_the_checkpoint(self) -> None:
        net = model()
        one = Updater(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4))
        run(net, one, range(1))
        two = Updater(torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.8))
        two.load_state_dict(one.state_dict())
        group = two.optimizer.param_groups[0]
        assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.8, 0)
        assert two.lr == 0.1  # of the last update
        assert len(two.optimizer.state) == 4

    def test_schedules_set_the_options_after_a_load(self) -> None:
        net = model()
        schedules = {
            "lr": LinearParamScheduler(1.0, 0.0),
            "momentum": LinearParamScheduler(1.0, 0.5),
        }
        updater = Updater(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8), schedules=Schedules(schedules)
        )
        run(net, updater, range(1))
        updater.load_state_dict(updater.state_dict())
        updater.begin(0.5)
        assert updater.lr == pytest.approx(0.05)
        assert updater.optimizer.param_groups[0]["momentum"] == pytest.approx(0.6)

    def test_learning_rate_of_an_optimizer_without_one_is_nan(self) -> None:
        optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
        del optimizer.param_groups[0]["lr"]
        assert math.isnan(Updater(optimizer).lr)

    def test_state_contains_no_options_but_the_last_learning_rate(self) -> None:
        updater = Updater(torch.optim.SGD(model().parameters(), lr=0.1))
        state = {"optimizer": {}, "skipped": 0, "skipped_in_row": 0, "used_lr": 0.1}
        assert updater.state_dict() == state


def test_each_group_is_scheduled_from_its_own_value() -> None:
    net = model()
    groups = [
        {"params": net[0].parameters(), "lr": 1.0},
        {"params": net[2].parameters(), "lr": 0.1},
    ]
    updater = Updater(
        torch.optim.SGD(groups), schedules=Schedules({"lr": LinearParamScheduler(1.0, 0.0)})
    )
    updater.begin(0.75)
    assert [group["lr"] for group in updater.optimizer.param_groups] == [0.25, pytest.approx(0.025)]
    assert len(updater.gradients.parameters) == 4


def test_stage_scales_each_group_from_its_own_value() -> None:
    groups = [{"lr": 0.1}, {"lr": 0.3}]
    stages = [StageOptions(), StageOptions(values={"lr": (0.1, 0.01)})]
    ParamSchedules(groups, Schedules(stages=stages)).apply(groups, 0.5, stage=1)
    assert [group["lr"] for group in groups] == pytest.approx([0.01, 0.03])


@pytest.mark.parametrize("option", ["momentun", "nesterov", "params", "betas"])
def test_schedule_of_an_option_that_is_no_number_is_rejected(option: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^OPTIMIZER\.SCHEDULES\.{option}: ",
    ):
        Updater(
            torch.optim.SGD(model().parameters(), lr=0.1),
            schedules=Schedules({option: LinearParamScheduler(1.0, 0.0)}),
        )


def zero(net: nn.Module, factor: float) -> Tensor:
    """Return 0 with the gradient `factor` for each entry of the last bias."""
    bias = list(net.parameters())[-1]
    return ((bias - bias.detach()) * factor).sum()


FAULTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "loss NaN": lambda net, loss: loss * math.nan,
    "loss infinite, gradients finite": lambda net, loss: loss + math.inf,
    "gradient infinite": lambda net, loss: loss + zero(net, 1.0).sqrt(),
    "gradient NaN": lambda net, loss: loss + zero(net, 0.0).sqrt(),
    "gradient infinite by its size": lambda net, loss: loss + zero(net, 3e38) * 2 + zero(net, 3e38),
}


def run_with(
    net: nn.Module,
    updater: Updater,
    fault: str,
    bad: Collection[int],
    numbers: range = range(UPDATES),
) -> list[NonFinite]:
    told: list[NonFinite] = []
    for number in numbers:
        inputs, targets = batch(number)
        updater.begin(number / UPDATES)
        loss = mse_loss(net(inputs), targets)
        updater.backward(FAULTS[fault](net, loss) if number in bad else loss)
        updater.step(told.append)
    return told


def skipping(make: Make, net: nn.Module, lag: int = 0, **options: Any) -> Updater:
    schedules = {"lr": LinearParamScheduler(1.0, 0.0)}
    return Updater(
        make(net.parameters()),
        schedules=Schedules(schedules),
        guard=GuardSettings("skip", lag=lag),
        **options,
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


CASES = [(name, make, 0) for name, make in {**OPTIMIZERS, **GATED}.items()]
CASES += [(name, make, 1) for name, make in GATED.items()]


@pytest.mark.parametrize(
    ("name", "make", "lag"), CASES, ids=[f"{name}-lag{lag}" for name, _, lag in CASES]
)
@pytest.mark.parametrize("fault", FAULTS)
class TestGuard:
    @pytest.mark.parametrize("bad", [{0}, {2}, {1, 2, 5}])
    def test_skipped_update_changes_nothing(
        self, name: str, make: Make, lag: int, fault: str, bad: set[int]
    ) -> None:
        net, other = model(), model()
        one, two = skipping(make, net, lag), skipping(make, other)
        told = run_with(net, one, fault, bad)
        for number in sorted(set(range(UPDATES)) - bad):  # as if those updates had never been tried
            run(other, two, range(number, number + 1))
        state = one.state_dict()
        assert (
            state.pop("skipped") == len(bad) == len(told)
        )  # with a lag the last verdict came with the state
        assert state.pop("skipped_in_row") == (1 if UPDATES - 1 in bad else 0)
        assert same(state["optimizer"], two.state_dict()["optimizer"])
        assert equal(weights(net), weights(other))
        assert one.guard.skipped == len(bad)

    def test_stop_restores_everything(self, name: str, make: Make, lag: int, fault: str) -> None:
        net, other = model(), model()
        one, two = (
            Updater(make(net.parameters()), guard=GuardSettings(lag=lag)),
            Updater(make(other.parameters())),
        )
        run(net, one, range(3))
        run(other, two, range(3))
        with raises(NumericsError, key="OPTIMIZER.on_nonfinite", given="'stop'"):
            run_with(net, one, fault, {3}, range(3, 5))
        assert equal(weights(net), weights(other))
        assert same(one.optimizer.state_dict()["state"], two.optimizer.state_dict()["state"])
        assert all(parameter.grad is None for parameter in net.parameters())
        if lag:  # the position has moved past the update: nothing of it may be saved
            with pytest.raises(NumericsError):
                one.state_dict()
        else:
            assert one.state_dict()["skipped"] == 0


@pytest.mark.parametrize("fault", ["loss NaN", "gradient infinite", "gradient NaN"])
def test_nonfinite_update_without_the_guard_destroys_the_weights(fault: str) -> None:
    net = model()
    updater = Updater(OPTIMIZERS["sgd"](net.parameters()), guard=GuardSettings("ignore"))
    run_with(net, updater, fault, {2})
    assert not all(tensor.isfinite().all() for tensor in weights(net))
    assert updater.state_dict()["skipped"] == 0


class TestReport:
    def told(self, fault: str, *, lag: int = 0, **options: Any) -> NonFinite:
        net = model()
        names = [name for name, _ in net.named_parameters()]
        guard = GuardSettings("skip", names=names, lag=lag)
        updater = Updater(OPTIMIZERS["sgd"](net.parameters()), guard=guard, **options)
        told = run_with(net, updater, fault, {2}, range(4))
        assert len(told) == 1
        return told[0]

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"gradients": GradientSettings(clip_norm=1.0)},
            {"gradients": GradientSettings(clip_value=0.1)},
            {"gradients": GradientSettings(clip_norm=1.0, clip_value=0.1)},
        ],
    )
    def test_names_are_found_before_clipping(self, options: dict[str, Any]) -> None:
        for fault in ("gradient infinite", "gradient NaN"):
            found = self.told(fault, **options)
            assert found.gradients == ("2.bias",)
            assert math.isfinite(found.loss)
            assert found.in_row == 1

    def test_nonfinite_loss_is_reported(self) -> None:
        found = self.told("loss infinite, gradients finite")
        assert (found.loss, found.gradients) == (math.inf, ())

    def test_overflow_of_the_norm_is_reported(self) -> None:
        net = model()
        guard = GuardSettings("skip")
        updater = Updater(
            OPTIMIZERS["sgd"](net.parameters()),
            gradients=GradientSettings(clip_norm=1.0),
            guard=guard,
        )
        told: list[NonFinite] = []
        updater.backward(zero(net, 1e30))
        updater.step(told.append)
        assert [found.gradients for found in told] == [()]
        assert equal(weights(net), weights(model()))

    def test_report_with_a_lag_has_no_names_of_gradients(self) -> None:
        found = self.told("gradient infinite", lag=1)
        assert found.gradients is None
        assert math.isfinite(found.loss)

    def test_parameters_without_names_are_numbered(self) -> None:
        net = model()
        told = run_with(net, skipping(OPTIMIZERS["sgd"], net), "gradient NaN", {0}, range(1))
        assert told[0].gradients == ("parameter 3",)

    def test_loss_of_each_micro_batch_is_checked(self) -> None:
        net = model()
        updater = skipping(OPTIMIZERS["sgd"], net)
        told: list[NonFinite] = []
        for factor in (1.0, math.inf, 1.0):
            updater.backward(zero(net, 1.0) + factor, 1 / 3)
        updater.step(told.append)
        assert [found.loss for found in told] == [math.inf]
        for factor in (3.0, 6.0, 9.0):
            updater.backward(zero(net, 1.0) + factor, 1 / 3)
        updater.step(told.append)
        assert (len(told), updater.guard.skipped, updater.guard.in_row) == (1, 1, 0)


class TestNorm:
    def test_norm_is_taken_before_clipping(self) -> None:
        net = model()
        updater = Updater(
            OPTIMIZERS["sgd"](net.parameters()), gradients=GradientSettings(clip_norm=0.01)
        )
        updater.backward(zero(net, 3.0))
        updater.step()
        assert updater.gradients.norm is not None
        assert updater.gradients.norm.shape == ()
        assert updater.gradients.norm.item() == pytest.approx(3.0 * math.sqrt(2))  # two entries
        assert not updater.gradients.norm.requires_grad

    @pytest.mark.parametrize("options", [{}, {"gradients": GradientSettings(clip_value=1.0)}])
    def test_norm_is_none_unless_needed(self, options: dict[str, Any]) -> None:
        updater = Updater(OPTIMIZERS["sgd"]((net := model()).parameters()), **options)
        run(net, updater, range(1))
        assert updater.gradients.norm is None

    @pytest.mark.feature("48", "gradients are unscaled before clipping", "`OPTIMIZER.clip_norm`")
    def test_norm_is_unscaled(self) -> None:
        net = model()
        updater = TestScaler.updater(net, gradients=GradientSettings(clip_norm=0.01))
        updater.backward(zero(net, 3.0))
        updater.step()
        assert updater.gradients.norm is not None
        assert updater.gradients.norm.item() == pytest.approx(3.0 * math.sqrt(2))


class TestScalerStreak:
    def updater(self, net: nn.Module, *, lag: int = 0, **options: Any) -> Updater:
        return TestScaler.updater(net, guard=GuardSettings(skip_budget=3, lag=lag), **options)

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("clip_norm", [None, 0.1])
    def test_skipped_updates_in_a_row_are_counted_and_limited(
        self, lag: int, clip_norm: float | None
    ) -> None:
        net = model()
        updater = self.updater(net, lag=lag, gradients=GradientSettings(clip_norm=clip_norm))
        told = run_with(net, updater, "gradient infinite", {1, 2, 4}, range(6))
        updater.resolve()
        assert (updater.guard.skipped, updater.guard.in_row, len(told)) == (3, 0, 3)
        assert [found.scale for found in told] == [2.0**9, 2.0**8, 2.0**7]
        before = weights(net)
        with raises(NumericsError, key="OPTIMIZER.skip_budget", given="3"):
            run_with(net, updater, "gradient NaN", range(9), range(9))
        assert equal(weights(net), before)

    def test_growth_of_the_scale_is_no_skipped_update(self) -> None:
        net = model()
        updater = self.updater(net)
        run(net, updater)
        assert updater.scaler is not None
        assert updater.scaler.get_scale() == 2.0**13
        assert updater.guard.skipped == 0

    def test_nonfinite_loss_is_no_overflow(self) -> None:
        net = model()
        updater = self.updater(net)
        run(net, updater)
        assert updater.scaler is not None
        before, scale = weights(net), updater.scaler.get_scale()
        inputs, targets = batch(0)
        updater.backward(mse_loss(net(inputs * math.nan), targets))
        with raises(NumericsError, key="OPTIMIZER.on_nonfinite"):
            updater.step()
        assert equal(before, weights(net))
        assert (updater.scaler.get_scale(), updater.guard.skipped) == (scale, 0)


class Searching(torch.optim.SGD):
    """Keeps what it has found among its options, and a mean in double precision."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["found"] = group.get("found", 1.0) * 0.9
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault(
                    "mean", torch.zeros_like(parameter, dtype=torch.float64)
                )
                kept.mul_(0.9).add_(parameter.grad)
                parameter.data.sub_((group["found"] * group["lr"] * kept).to(parameter.dtype))


def test_state_in_options_and_other_types_is_restored() -> None:
    def trained(numbers: range, updater: Updater, net: nn.Module) -> list[Tensor]:
        for number in numbers:
            inputs, targets = batch(number)
            updater.begin(0.0)
            updater.backward(mse_loss(net(inputs), targets))
            updater.step()
        return weights(net)

    def begun() -> tuple[nn.Module, Updater]:
        net = model()
        return net, Updater(Searching(net.parameters(), lr=0.1))

    net, updater = begun()
    whole = trained(range(6), updater, net)
    net, updater = begun()
    trained(range(3), updater, net)
    state, (other, again) = updater.state_dict(), begun()
    assert state["options"] == [{"found": pytest.approx(0.9**3)}]
    other.load_state_dict(net.state_dict())
    again.load_state_dict(state)
    assert equal(trained(range(3, 6), again, other), whole)


class TestBuffers:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("guarded", [True, False])
    def test_skipped_update_restores_running_statistics(self, lag: int, *, guarded: bool) -> None:
        def net() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

        def train(net: nn.Module, numbers: list[int], *, lag: int) -> list[Tensor]:
            buffers = list(net.buffers()) if guarded else []
            guard = GuardSettings("skip", buffers=partial(list, buffers), lag=lag)
            updater = Updater(OPTIMIZERS["sgd"](net.parameters()), guard=guard)
            for number in numbers:
                inputs, targets = batch(number)
                updater.begin(number / UPDATES)
                updater.backward(mse_loss(net(inputs * (math.nan if number == 2 else 1)), targets))
                updater.step()
            return weights(net)

        assert equal(train(net(), [0, 1, 2, 3], lag=lag), train(net(), [0, 1, 3], lag=0)) == guarded

    def test_stop_restores_running_statistics(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        updater = Updater(
            OPTIMIZERS["sgd"](net.parameters()),
            guard=GuardSettings("stop", buffers=lambda: list(net.buffers())),
        )
        before = [buffer.clone() for buffer in net.buffers()]
        inputs, targets = batch(0)
        updater.begin(0.0)
        updater.backward(mse_loss(net(inputs * math.nan), targets))
        assert any(
            buffer.is_floating_point() and bool(buffer.isnan().any()) for buffer in net.buffers()
        )
        with pytest.raises(NumericsError):
            updater.step()
        assert equal(before, list(net.buffers()))


class TestCounts:
    def test_counts_are_saved(self) -> None:
        net, other = model(), model()
        one = skipping(OPTIMIZERS["sgd"], net)
        run_with(net, one, "loss NaN", {1, 2}, range(3))
        two = skipping(OPTIMIZERS["sgd"], other)
        two.load_state_dict(decode(*encode(one.state_dict())))
        assert (two.guard.skipped, two.guard.in_row) == (2, 2)

    def test_state_without_counts_is_loaded(self) -> None:
        net = model()
        updater = skipping(OPTIMIZERS["sgd"], net)
        run_with(net, updater, "loss NaN", {1}, range(2))
        state = {
            key: value
            for key, value in updater.state_dict().items()
            if not key.startswith("skipped")
        }
        updater.load_state_dict(state)
        assert (updater.guard.skipped, updater.guard.in_row) == (0, 0)

    def test_state_waits_for_the_pending_verdict(self) -> None:
        net = model()
        updater = skipping(OPTIMIZERS["adamw"], net, lag=1)
        told = run_with(net, updater, "loss NaN", {2}, range(3))
        assert (len(told), updater.guard.skipped) == (0, 0)
        assert updater.state_dict()["skipped"] == 1
        assert len(told) == 1


@pytest.mark.parametrize(("name", "lag"), [("rmsprop", 1), ("sgd", 2)])
def test_unsupported_lag_is_rejected(name: str, lag: int) -> None:
    with pytest.raises(ValueError, match=rf"^lag = {lag}:"):
        skipping(OPTIMIZERS[name], model(), lag)


def test_weights_with_a_late_gradient_get_a_fresh_state() -> None:
    """The first update of a weight is read at once, because fused SGD leaves a state that is gated
    uninitialised."""

    def train(bad: bool) -> tuple[list[Tensor], Any]:
        weight, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        groups = [
            {"params": [weight]},
            {"params": [late]},
        ]  # within a group fused SGD takes no weight that comes late
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
        updater = Updater(optimizer, guard=GuardSettings("skip", lag=1))
        for number in range(5):
            loss = weight.sum() + (late.sum() if number >= 2 else 0)
            if number == 2 and not bad:
                continue
            updater.backward(loss * (math.nan if number == 2 else 1))
            updater.step()
        return [weight, late], updater.state_dict()["optimizer"]

    (one, kept), (two, other) = train(bad=True), train(bad=False)
    assert equal(one, two)
    assert same(kept, other)


@pytest.mark.parametrize(
    ("device", "mode", "waits"),
    [("cpu", "stop", False), ("meta", "ignore", False), ("meta", "stop", True)],
)
def test_updater_reports_whether_updates_wait_for_the_device(
    device: str, mode: Any, *, waits: bool
) -> None:
    """The device `meta` stands for one whose kernels run on their own."""
    updater = Updater(
        OPTIMIZERS["rmsprop"](model().to(device).parameters()), guard=GuardSettings(mode)
    )
    assert updater.waits == waits
