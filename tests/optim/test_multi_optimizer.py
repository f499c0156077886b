"""Several optimizers are one: all of them step or none, and their state is one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler
from raising import raises
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from updating import UPDATES, batch, equal, run, weights

from phasetrain.checkpoint.codec import decode, encode
from phasetrain.errors import ConfigError
from phasetrain.optim import GradientSettings, Schedules
from phasetrain.optim.groups import Weight, list_weights
from phasetrain.optim.multi_optimizer import MAIN, MultiOptimizer, assign_weights, refuse_closures
from phasetrain.optim.update.nonfinite import GuardSettings, NonFinite
from phasetrain.optim.update.updater import Updater


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 2))


def parts(net: nn.Sequential) -> dict[str, Optimizer]:
    groups = [{"params": net[2].weight}, {"params": net[2].bias, "weight_decay": 0.0}]
    return {
        MAIN: torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9, fused=True),
        "middle": torch.optim.AdamW(groups, lr=0.01, fused=True),
        "last": torch.optim.RMSprop(net[4].parameters(), lr=0.02),
    }


def fused(net: nn.Sequential) -> dict[str, Optimizer]:
    rest = [*net[2].parameters(), *net[4].parameters()]
    return {MAIN: parts(net)[MAIN], "others": torch.optim.Adam(rest, lr=0.01, fused=True)}


def by_hand(
    net: nn.Module, made: dict[str, Optimizer], prepare: Callable[[], Any] = lambda: None
) -> None:
    for number in range(UPDATES):
        inputs, targets = batch(number)
        mse_loss(net(inputs), targets).backward()
        prepare()
        for one in made.values():
            one.step()
            one.zero_grad()


class TestAgainstPlainTorch:
    def test_updates_equal_plain_torch(self) -> None:
        net, other = model(), model()
        run(net, updater := Updater(MultiOptimizer(parts(net))))
        by_hand(other, parts(other))
        assert equal(weights(net), weights(other))
        assert not equal(weights(net), weights(model()))
        assert updater.lr == 0.1

    def test_clipping_uses_the_norm_of_the_whole_gradient(self) -> None:
        net, other = model(), model()
        run(net, Updater(MultiOptimizer(parts(net)), gradients=GradientSettings(clip_norm=0.05)))
        by_hand(other, parts(other), lambda: nn.utils.clip_grad_norm_(other.parameters(), 0.05))
        assert equal(weights(net), weights(other))

    @pytest.mark.parametrize("make", [parts, fused])
    def test_scaled_updates_equal_plain_torch(self, make: Any) -> None:
        net, other = model(), model()
        run(net, Updater(MultiOptimizer(make(net)), scaler=GradScaler("cpu", init_scale=2.0**10)))
        scaler, made = GradScaler("cpu", init_scale=2.0**10), make(other)
        for number in range(UPDATES):
            inputs, targets = batch(number)
            scaler.scale(mse_loss(other(inputs), targets)).backward()
            for one in made.values():
                scaler.step(one)
            scaler.update()
            other.zero_grad()
        for one, two in zip(weights(net), weights(other), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


class TestState:
    def test_resume_from_a_checkpoint_is_bit_identical(self) -> None:
        net, other = model(), model()
        run(net, one := Updater(MultiOptimizer(parts(net))), range(3))
        other.load_state_dict(net.state_dict())
        (two := Updater(MultiOptimizer(parts(other)))).load_state_dict(
            decode(*encode(one.state_dict()))
        )
        run(net, one, range(3, UPDATES))
        run(other, two, range(3, UPDATES))
        assert equal(weights(net), weights(other))

    def test_resume_without_the_state_differs(self) -> None:
        net, other = model(), model()
        run(net, one := Updater(MultiOptimizer(parts(net))), range(3))
        other.load_state_dict(net.state_dict())
        run(net, one, range(3, UPDATES))
        run(other, Updater(MultiOptimizer(parts(other))), range(3, UPDATES))
        assert not equal(weights(net), weights(other))

    def test_parameters_are_numbered_across_optimizers(self) -> None:
        net = model()
        run(net, Updater(several := MultiOptimizer(parts(net))), range(1))
        state = several.state_dict()
        assert {number: sorted(kept) for number, kept in state["state"].items()} == {
            0: ["momentum_buffer"],
            1: ["momentum_buffer"],
            2: ["exp_avg", "exp_avg_sq", "step"],
            3: ["exp_avg", "exp_avg_sq", "step"],
            4: ["square_avg", "step"],
            5: ["square_avg", "step"],
        }
        assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2], [3], [4, 5]]
        assert set(several.state) == set(net.parameters())


class TestAllOrNone:
    @pytest.mark.feature("55", "multiple optimizers; all step or none", "`OPTIMIZER.others`")
    @pytest.mark.parametrize("at", [0, 2, 4])
    @pytest.mark.parametrize(
        ("make", "lag", "scaled"), [(parts, 0, False), (fused, 1, False), (fused, 0, True)]
    )
    def test_nonfinite_gradient_skips_all_optimizers(
        self, at: int, make: Any, lag: int, scaled: bool
    ) -> None:
        net = model()
        scaler = GradScaler("cpu", init_scale=2.0) if scaled else None
        updater = Updater(
            MultiOptimizer(make(net)), scaler=scaler, guard=GuardSettings("skip", lag=lag)
        )
        run(net, updater, range(2))
        before, state = weights(net), encode(updater.state_dict()["optimizer"])
        told: list[NonFinite] = []
        inputs, targets = batch(2)
        updater.begin(0.5)
        updater.backward(mse_loss(net(inputs), targets))
        net[at].bias.grad[0] = math.inf
        updater.step(told.append)
        updater.resolve()
        assert len(told) == 1
        assert equal(weights(net), before)
        assert encode(updater.state_dict()["optimizer"]) == state
        run(net, updater, range(3, 4))
        assert not equal(weights(net), before)

    @pytest.mark.parametrize(("make", "gated"), [(parts, False), (fused, True)])
    def test_update_is_skipped_on_the_device_if_all_support_it(
        self, make: Any, gated: bool
    ) -> None:
        assert ("_step_supports_amp_scaling" in vars(MultiOptimizer(make(model())))) is gated


class TestSchedules:
    def test_schedule_applies_to_optimizers_with_the_option(self) -> None:
        net = model()
        falling = {"lr": LinearParamScheduler(1.0, 0.0), "momentum": LinearParamScheduler(1.0, 0.5)}
        updater = Updater(MultiOptimizer(fused(net)), schedules=Schedules(falling, groups={1: {}}))
        updater.begin(0.5)
        main, other = updater.optimizer.param_groups
        assert (main["lr"], main["momentum"], other["lr"]) == (0.05, pytest.approx(0.675), 0.005)
        assert "momentum" not in other

    def test_own_schedules_have_priority(self) -> None:
        own = {1: {"lr": LinearParamScheduler(0.0, 2.0)}}
        updater = Updater(
            MultiOptimizer(fused(model())),
            schedules=Schedules({"lr": LinearParamScheduler(1.0, 0.0)}, groups=own),
        )
        updater.begin(0.75)
        assert [group["lr"] for group in updater.optimizer.param_groups] == [
            0.025,
            pytest.approx(0.015),
        ]

    def test_schedules_set_the_groups_of_each_optimizer_after_a_load(self) -> None:
        own = {1: {"lr": LinearParamScheduler(0.0, 2.0)}}
        updater = Updater(
            several := MultiOptimizer(fused(net := model())), schedules=Schedules(groups=own)
        )
        run(net, updater, range(1))
        updater.load_state_dict(updater.state_dict())
        updater.begin(0.5)
        assert several.optimizers["others"].param_groups[0]["lr"] == 0.01
        assert several.param_groups[1] is several.optimizers["others"].param_groups[0]

    def test_factor_applies_once_to_each_optimizer(self) -> None:
        own = {1: {"lr": LinearParamScheduler(0.0, 2.0)}}
        updater = Updater(MultiOptimizer(fused(model())), schedules=Schedules(groups=own))
        updater.factor = 0.5
        for _ in range(2):
            updater.begin(0.75)
        assert [group["lr"] for group in updater.optimizer.param_groups] == [
            0.05,
            pytest.approx(0.0075),
        ]


def trained() -> list[Weight]:
    return list_weights(model())


def names(found: list[Weight]) -> list[str]:
    return [weight.name for weight in found]


class TestAssignWeights:
    def test_weights_without_a_rule_go_to_the_main_optimizer(self) -> None:
        found = assign_weights(
            trained(),
            {
                "last": {"name": "adam", "match": ["4.*"]},
                "first": {"name": "sgd", "match": "0.bias"},
            },
        )
        assert {label: names(weights) for label, weights in found.items()} == {
            MAIN: ["0.weight", "2.weight", "2.bias"],
            "last": ["4.weight", "4.bias"],
            "first": ["0.bias"],
        }

    @pytest.mark.parametrize(
        ("others", "message"),
        [
            (
                {"one": {"name": "adam", "match": "4.*"}, "two": {"name": "adam", "max_ndim": 1}},
                r"^OPTIMIZER\.others: 4\.bias .*\bone and two\b",
            ),
            (
                {"one": {"name": "adam", "match": "2.wieght"}},
                r"^OPTIMIZER\.others\.one\.match = '2\.wieght' .*\b6\b.*'2\.weight'",
            ),
            (
                {"one": {"name": "adam", "types": "Conv2d"}},
                r"^OPTIMIZER\.others\.one\.types = 'Conv2d':",
            ),
            (
                {"one": {"name": "adam"}},
                r"^OPTIMIZER\.others\.one = .*:",
            ),
            (
                {"one": {"name": "adam", "match": "*"}},
                r"^OPTIMIZER\.others: one .*\b6 ",
            ),
        ],
    )
    def test_bad_rules_are_rejected(self, others: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            assign_weights(trained(), others)


def test_optimizer_with_a_closure_is_rejected() -> None:
    with raises(ConfigError, key="OPTIMIZER.name", given="'LBFGS'"):
        refuse_closures(torch.optim.LBFGS(model().parameters()), "OPTIMIZER")
    refuse_closures(torch.optim.SGD(model().parameters()), "OPTIMIZER")
