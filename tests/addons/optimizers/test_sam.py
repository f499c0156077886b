"""Sharpness-aware minimisation against the formula, and what a second pass must not change."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from updating import equal, weights

from phasetrain.addons.optimizers.sam import SamSettings
from phasetrain.errors import ConfigError, NumericsError
from phasetrain.optim import GradientSettings
from phasetrain.optim.update.nonfinite import GuardSettings, NonFinite
from phasetrain.optim.update.updater import Updater

UPDATES = 5
LR = 0.1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (4, 2))  # type: ignore[return-value]


def updater_of(net: nn.Module, sam: SamSettings | None, **options: Any) -> Updater:
    guard = GuardSettings(
        options.pop("on_nonfinite", "skip"),
        buffers=lambda: list(net.buffers()),
        names=options.pop("names", ()),
    )
    momentum = options.pop("momentum", 0.0)
    return Updater(
        torch.optim.SGD(net.parameters(), lr=LR, momentum=momentum), sam=sam, guard=guard, **options
    )


def step(
    net: nn.Module, updater: Updater, losses: list[Any], told: list[NonFinite] | None = None
) -> list[bool]:
    """Make an update from what `losses` compute."""
    updater.begin(0.0)
    for loss in losses:
        updater.backward(loss(net), 1 / len(losses))
    went = []
    if updater.sam is not None:
        with updater.ascent() as moved:
            went.append(moved)
            for loss in losses if moved else ():
                updater.backward(loss(net), 1 / len(losses))
    updater.step(*([] if told is None else [told.append]))
    return went


def loss_of(number: int, rows: slice = slice(None)) -> Any:
    inputs, targets = batch(number)
    return lambda net: mse_loss(net(inputs[rows]), targets[rows])


def run(net: nn.Module, updater: Updater, numbers: range = range(UPDATES)) -> list[Tensor]:
    for number in numbers:
        step(net, updater, [loss_of(number)])
    return weights(net)


def by_formula(settings: SamSettings) -> list[Tensor]:
    """Return the weights after some updates, as the paper writes them."""
    net = model()
    names = [name for name, _ in net.named_parameters()]
    values: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in net.named_parameters()}

    def gradient(at: Mapping[str, Tensor], number: int) -> list[Tensor]:
        inputs, targets = batch(number)
        leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
        loss = mse_loss(torch.func.functional_call(net, leaves, (inputs,)), targets)
        return list(torch.autograd.grad(loss, [leaves[name] for name in names]))

    for number in range(UPDATES):
        first = gradient(values, number)
        flat = torch.cat([g.reshape(-1) for g in first])
        if settings.adaptive:
            size = torch.cat(
                [(values[n].abs() * g).reshape(-1) for n, g in zip(names, first, strict=True)]
            ).norm()
            moves = [
                settings.rho * values[n] ** 2 * g / size for n, g in zip(names, first, strict=True)
            ]
        else:
            moves = [settings.rho * g / flat.norm() for g in first]
        there = {n: values[n] + e for n, e in zip(names, moves, strict=True)}
        second = gradient(there, number)
        values = {n: values[n] - LR * g for n, g in zip(names, second, strict=True)}
    return list(values.values())


class TestAgainstTheFormula:
    @pytest.mark.parametrize(
        "settings", [SamSettings(0.05), SamSettings(0.5), SamSettings(0.5, adaptive=True)]
    )
    def test_updates_follow_the_formula(self, settings: SamSettings) -> None:
        net = model()
        found, expected = run(net, updater_of(net, settings)), by_formula(settings)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

    def test_updates_differ_from_the_optimizer_alone(self) -> None:
        net, plain = model(), model()
        run(net, updater_of(net, SamSettings(0.05)))
        run(plain, updater_of(plain, None))
        assert (
            max(
                float((a - b).abs().max())
                for a, b in zip(weights(net), weights(plain), strict=True)
            )
            > 1e-4
        )

    def test_micro_batches_give_the_update_of_the_whole_batch(self) -> None:
        net, whole = model(), model()
        updater = updater_of(net, SamSettings(0.5), momentum=0.9)
        for number in range(UPDATES):
            step(net, updater, [loss_of(number, slice(at, at + 2)) for at in range(0, 8, 2)])
        run(whole, updater_of(whole, SamSettings(0.5), momentum=0.9))
        for one, other in zip(weights(net), weights(whole), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    def test_scaled_updates_follow_the_formula(self) -> None:
        net, plain = model().float(), model().float()
        for one, scaler in ((net, GradScaler("cpu", init_scale=2.0**10)), (plain, None)):
            updater = updater_of(one, SamSettings(0.5), scaler=scaler)
            for number in range(UPDATES):
                inputs, targets = (value.float() for value in batch(number))
                step(one, updater, [lambda n, x=inputs, y=targets: mse_loss(n(x), y)])
        for one, other in zip(weights(net), weights(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    def test_second_gradient_is_clipped(self) -> None:
        net = model()
        updater = updater_of(net, SamSettings(0.5), gradients=GradientSettings(clip_norm=1e-3))
        before = [p.detach().clone() for p in net.parameters()]
        step(net, updater, [loss_of(0)])
        moved = torch.cat(
            [(p - b).reshape(-1) for p, b in zip(net.parameters(), before, strict=True)]
        ).norm()
        assert moved.item() == pytest.approx(LR * 1e-3, rel=1e-3)
        assert updater.gradients.norm is not None
        assert updater.gradients.norm.item() > 1e-3


class TestTheFirstPassCounts:
    def test_running_statistics_are_updated_once(self) -> None:
        net, plain = normed(), normed()
        step(net, updater_of(net, SamSettings(0.5)), [loss_of(0)])
        inputs, _ = batch(0)
        plain(inputs)
        assert equal([*net.buffers()], [*plain.buffers()])
        plain(inputs)
        assert not equal([*net.buffers()], [*plain.buffers()])

    def test_both_passes_start_from_the_same_statistics(self) -> None:
        net = normed()
        seen: list[Tensor] = []
        net[1].register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.clone()))
        step(net, updater_of(net, SamSettings(0.5)), [loss_of(0)])
        assert len(seen) == 2
        assert torch.equal(seen[0], seen[1])


class TestNonfinite:
    @pytest.mark.parametrize("fault", [math.nan, 1.0])
    def test_skipped_update_changes_nothing(self, fault: float) -> None:
        net, other = normed(), normed()
        names = [name for name, _ in net.named_parameters()]
        one, two = (
            updater_of(n, SamSettings(0.5), momentum=0.9, names=names) for n in (net, other)
        )
        run(net, one, range(2))
        run(other, two, range(2))
        told: list[NonFinite] = []

        def faulty(net: nn.Module) -> Tensor:
            bias = list(net.parameters())[-1]
            steep = (bias - bias.detach()).sum().sqrt()  # 0 with an infinite gradient
            return loss_of(2)(net) * fault + steep

        assert step(net, one, [faulty], told) == [False]
        assert one.guard.skipped == len(told) == 1
        assert equal(weights(net), weights(other))
        if fault == 1.0:
            assert told[0].gradients == ("2.bias",)
            assert math.isfinite(told[0].loss)
        run(net, one, range(3, 5))
        run(other, two, range(3, 5))
        assert equal(weights(net), weights(other))

    @pytest.mark.parametrize("fault", [math.nan, 1e30])
    def test_skipping_on_the_device_reads_no_value(self, fault: float) -> None:
        net = model().float()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, fused=True)
        updater = Updater(optimizer, sam=SamSettings(0.5), guard=GuardSettings("skip", lag=1))

        def loss(net: nn.Module) -> Tensor:
            inputs, targets = (value.float() for value in batch(0))
            return mse_loss(net(inputs), targets)

        def steep(net: nn.Module) -> Tensor:
            bias = list(net.parameters())[-1]
            return (
                (bias - bias.detach()) * fault
            ).sum()  # the norm of its gradient is no number, or overflows

        for _ in range(2):
            step(net, updater, [loss])
        before, told = weights(net), list[NonFinite]()
        assert step(net, updater, [steep], told) == [True]
        updater.resolve()
        assert len(told) == 1
        assert equal(weights(net), before)
        step(net, updater, [loss])
        assert not equal(weights(net), before)

    def test_nonfinite_second_gradient_skips_the_update(self) -> None:
        net = normed()
        updater = updater_of(net, SamSettings(0.5), momentum=0.9)
        run(net, updater, range(2))
        before, calls, told = weights(net), [], list[NonFinite]()

        def second(net: nn.Module) -> Tensor:
            calls.append(1)
            return loss_of(2)(net) * (math.nan if len(calls) == 2 else 1.0)

        assert step(net, updater, [second], told) == [True]
        assert equal(weights(net), before)
        assert math.isfinite(told[0].loss)

    def test_overflow_of_the_norm_skips_the_update(self) -> None:
        net = model().float()
        updater = updater_of(net, SamSettings(0.5))
        before = weights(net)

        def steep(net: nn.Module) -> Tensor:
            bias = list(net.parameters())[-1]
            return ((bias - bias.detach()) * 1e30).sum()

        told: list[NonFinite] = []
        assert step(net, updater, [steep], told) == [False]
        assert len(told) == 1
        assert equal(weights(net), before)

    def test_stop_restores_the_weights(self) -> None:
        net = normed()
        updater, before = updater_of(net, SamSettings(0.5), on_nonfinite="stop"), weights(net)
        with pytest.raises(NumericsError):
            step(net, updater, [lambda n: loss_of(0)(n) * math.nan])
        assert equal(weights(net), before)


def test_error_in_the_second_pass_restores_the_weights() -> None:
    net = normed()
    updater, before = updater_of(net, SamSettings(0.5)), [p.clone() for p in net.parameters()]
    updater.begin(0.0)
    updater.backward(loss_of(0)(net))
    with suppress(ArithmeticError), updater.ascent():
        assert not equal([*net.parameters()], before)
        raise ArithmeticError
    assert equal([*net.parameters()], before)


def test_task_without_a_second_pass_is_rejected() -> None:
    net = normed()
    updater = updater_of(net, SamSettings(0.5))
    run(net, updater, range(1))
    updater.begin(0.0)
    updater.backward(loss_of(0)(net))
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(
        ConfigError,
        match=r"^OPTIMIZER\.sam: ",
    ):
        updater.step()
    assert equal([*net.parameters()], before)


def test_defaults_are_those_of_the_paper() -> None:
    assert SamSettings() == SamSettings(rho=0.05, adaptive=False)
