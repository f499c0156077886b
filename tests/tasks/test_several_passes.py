"""Several backward passes in a step: two losses with an optimizer each, and the second pass of
SAM."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from optimizer_parts import Adversarial, AdversarialUpdaters, Rivals
from raising import raises
from torch import Tensor, nn
from torch.nn.functional import softplus

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS, Meter
from phasetrain.optim import GuardSettings, MultiOptimizer, Updater
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, Position, SavedTask, Supervised
from phasetrain.tasks.parts import StepEvents


def rivals() -> Rivals:
    torch.manual_seed(0)
    return Rivals()


def optimizers(model: Rivals) -> dict[str, torch.optim.Optimizer]:
    return {
        "": torch.optim.Adam(model.generator.parameters(), lr=0.01),
        "critic": torch.optim.SGD(model.critic.parameters(), lr=0.1, momentum=0.5),
    }


def task(precision: Any = "fp32", **options: Any) -> Adversarial:
    model = rivals()
    updater = Updater(MultiOptimizer(optimizers(model)), guard=GuardSettings("skip"))
    machine = Machine(torch.device("cpu"), precision)
    return Adversarial(Parts(model, nn.Identity(), {}, updater, {}, machine, World(), 0), **options)


def batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return Batch(torch.randn(4, 1, 8, 8, generator=generator), torch.zeros(4), torch.arange(4), 4)


def at(updates: int) -> Position:
    return Position("train", updates=updates, step=updates, where=0.0)


def weights(module: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in module.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.feature("9")
def test_each_part_learns_from_its_own_loss() -> None:
    made, model = task(), rivals()
    both = optimizers(model)
    for number in range(4):
        out = made.train_step([batch(number)], at(number), StepEvents())
        made.reseed(at(number))
        real = model.critic(batch(number).input.flatten(1))
        fake = model.generator(torch.randn(4, 8)).detach()
        critic = (softplus(-real) + softplus(model.critic(fake))).mean()
        made.reseed(at(number))
        generator = softplus(-model.critic(model.generator(torch.randn(4, 8)))).mean()
        for loss, part in ((critic, model.critic), (generator, model.generator)):
            for parameter, grad in zip(
                part.parameters(), torch.autograd.grad(loss, [*part.parameters()]), strict=True
            ):
                parameter.grad = grad
        for one in both.values():
            one.step()
        assert float(out.loss) == pytest.approx((critic + generator).item())
    assert equal(weights(made.model), weights(model))
    assert not equal(weights(made.model), weights(rivals()))


def test_parts_can_be_updated_in_turn() -> None:
    made = task(in_turn=True)
    for number in range(4):
        before = {name: weights(getattr(made.model, name)) for name in ("critic", "generator")}
        made.train_step([batch(number)], at(number), StepEvents())
        moved = [
            name
            for name, old in before.items()
            if not equal(old, weights(getattr(made.model, name)))
        ]
        assert moved == [("critic", "generator")[number % 2]]


def test_nonfinite_loss_skips_all_parts() -> None:
    made = task()
    made.train_step([batch(0)], at(0), StepEvents())
    before = weights(made.model)
    spoilt = batch(1)
    spoilt.input[0, 0, 0, 0] = torch.nan
    made.train_step([spoilt], at(1), StepEvents())
    assert equal(weights(made.model), before)
    assert made.updater.guard.skipped == 1


@pytest.mark.parametrize(("stream", "same"), [(0, True), (1, False)])
def test_pass_draws_other_numbers_in_another_stream(stream: int, *, same: bool) -> None:
    made = task()
    drawn: list[Tensor] = []
    made.model.generator.register_forward_hook(lambda module, args, out: drawn.append(args[0]))
    for number, one in enumerate((0, stream, stream)):
        made.gradient_pass(
            [batch(0)], at(0), StepEvents(), forward=made.critic_loss, first=number == 0, stream=one
        )
    assert torch.equal(drawn[0], drawn[1]) is same
    assert torch.equal(drawn[1], drawn[2])


def test_gradients_of_a_pass_can_be_taken_and_combined() -> None:
    made, other = task(), task()
    for one in (made, other):
        one.begin_update(at(0))
    done = made.gradient_pass([batch(0)], at(0), StepEvents())
    first = made.updater.gradients.take()
    assert {one.grad for one in made.model.parameters()} == {None}
    made.gradient_pass([batch(1)], at(0), StepEvents(), first=False)
    pairs = zip(first, made.updater.gradients.take(), strict=True)
    made.updater.gradients.put([a if b is None or a is None else a + b for a, b in pairs])
    made.update(done, at(0), StepEvents())
    for number in range(2):
        other.gradient_pass([batch(number)], at(0), StepEvents(), first=False)
    other.update(done, at(0), StepEvents())
    for one, two in zip(weights(made.model), weights(other.model), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.feature("several_passes")
@pytest.mark.parametrize("kind", [Adversarial, Supervised])
def test_second_pass_of_an_undeclared_task_is_rejected_on_several_ranks(kind: type) -> None:
    made = task()
    made = kind(replace(made.parts, world=World(0, 2)))
    with raises(ConfigError, code="task.several_passes"):
        made.gradient_pass([batch(0)], at(0), StepEvents(), first=False)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_custom_passes_run_under_autocast(precision: Any, dtype: torch.dtype) -> None:
    made = task(precision=precision)
    seen: list[torch.dtype] = []
    made.model.critic.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    made.train_step([batch(0)], at(0), StepEvents())
    assert set(seen) == {dtype}


def test_custom_passes_accumulate_all_micro_batches() -> None:
    made, model, used = task(), rivals(), Heard()
    made.train_step([batch(0), batch(1)], at(0), used)
    assert used.calls == {"batch": 2, "forward": 4, "backward": 2, "update": 1}
    for number in range(2):
        made.reseed(at(0), number)
        real = model.critic(batch(number).input.flatten(1))
        fake = model.generator(torch.randn(4, 8)).detach()
        loss = (softplus(-real) + softplus(model.critic(fake))).mean() / 2
        loss.backward(inputs=[*model.critic.parameters()])
    optimizers(model)["critic"].step()
    for one, other in zip(made.model.critic.parameters(), model.critic.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class TestSeparateUpdaters:
    def made(self, **options: Any) -> AdversarialUpdaters:
        model = rivals()
        both = {name: Updater(one, **options) for name, one in optimizers(model).items()}
        machine = Machine(torch.device("cpu"), "fp32")
        parts = Parts(model, nn.Identity(), {}, both[""], {}, machine, World(), 0)
        return AdversarialUpdaters(replace(parts, other_updaters={"critic": both["critic"]}))

    def test_generator_learns_from_the_critic_after_its_step(self) -> None:
        made, model = self.made(), rivals()
        both = optimizers(model)
        for number in range(3):
            made.train_step([batch(number)], at(number), StepEvents())
            made.reseed(at(number))
            real = model.critic(batch(number).input.flatten(1))
            fake = model.generator(torch.randn(4, 8)).detach()
            loss = (softplus(-real) + softplus(model.critic(fake))).mean()
            loss.backward(inputs=[*model.critic.parameters()])
            both["critic"].step()
            both["critic"].zero_grad()
            made.reseed(at(number))
            loss = softplus(-model.critic(model.generator(torch.randn(4, 8)))).mean()
            loss.backward(inputs=[*model.generator.parameters()])
            both[""].step()
            both[""].zero_grad()
        assert equal(weights(made.model), weights(model))

    def test_each_updater_is_in_the_checkpoint(self) -> None:
        made, other = self.made(), self.made()
        made.train_step([batch(0)], at(0), StepEvents())
        saved = SavedTask(deepcopy(made.shared_state()))
        assert {"updater", "updater.critic"} <= saved.shared.keys()
        other.restore(saved)
        for one in (made, other):
            one.train_step([batch(1)], at(1), StepEvents())
        assert equal(weights(made.model), weights(other.model))

    def test_one_updater_can_skip_while_the_other_steps(self) -> None:
        made = self.made(guard=GuardSettings("skip"))
        made.train_step([batch(0)], at(0), StepEvents())
        critic, generator = weights(made.model.critic), weights(made.model.generator)
        spoilt = batch(1)
        spoilt.input[0, 0, 0, 0] = torch.nan
        made.train_step([spoilt], at(1), StepEvents())
        assert equal(weights(made.model.critic), critic)
        assert not equal(weights(made.model.generator), generator)
        skipped = {name: one.guard.skipped for name, one in made.updaters.items()}
        assert skipped == {"main": 0, "critic": 1}

    def test_update_is_not_withheld_if_an_updater_stepped_before(self) -> None:
        made = self.made(guard=GuardSettings("skip"))
        seen: list[Any] = []

        class Noted:
            def update(self, updates: int, *, skipped: Any) -> None:
                seen.append(skipped)

        made.parts = replace(made.parts, averages={"ema": Noted()})
        made.begin_update(at(0))
        done = made.gradient_pass(
            [batch(0)], at(0), StepEvents(), forward=made.critic_loss, updater="critic"
        )
        made.step_updater(made.updaters["critic"], done, at(0), StepEvents())
        made.update(done, at(0), StepEvents())
        assert seen == [False]


class Heard(StepEvents):
    """Counts what hooks hear."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_batch(self, batch: Batch) -> Batch:
        self.calls["batch"] += 1
        return batch

    def on_forward(self, out: StepOutput) -> StepOutput:
        self.calls["forward"] += 1
        return out

    def on_backward(self, out: StepOutput) -> None:
        self.calls["backward"] += 1

    def on_update(self) -> None:
        self.calls["update"] += 1


@pytest.mark.addon("optimizers")
class TestSharpnessAware:
    def made(self, model: nn.Module, rho: float = 0.5) -> Supervised:
        from phasetrain.addons.optimizers.sam import SamSettings

        updater = Updater(
            torch.optim.SGD(model.parameters(), lr=0.1), sam=SamSettings(rho) if rho else None
        )
        machine = Machine(torch.device("cpu"), "fp32")
        meters: dict[str, Meter] = {"samples": METERS.build("loss")}
        return Supervised(
            Parts(model, nn.CrossEntropyLoss(), meters, updater, {}, machine, World(), 0)
        )

    def batches(self) -> list[Batch]:
        made = [batch(number) for number in range(2)]
        return [Batch(one.input.flatten(1), torch.arange(4) % 2, one.ids, 4) for one in made]

    def test_both_passes_have_the_same_dropout(self) -> None:
        seen: list[Tensor] = []

        class Look(nn.Dropout):
            def forward(self, value: Tensor) -> Tensor:
                seen.append(super().forward(torch.ones(64)))
                return value

        self.made(nn.Sequential(Look(0.5), nn.Linear(64, 2))).train_step(
            self.batches(), at(0), StepEvents()
        )
        assert len(seen) == 4
        assert torch.equal(seen[0], seen[2])
        assert torch.equal(seen[1], seen[3])
        assert not torch.equal(seen[0], seen[1])

    def test_meters_and_hooks_get_the_first_pass(self) -> None:
        events, made, plain = Heard(), self.made(nn.Linear(64, 2)), self.made(nn.Linear(64, 2), 0.0)
        plain.model.load_state_dict(made.model.state_dict())
        out = made.train_step(self.batches(), at(0), events)
        other = plain.train_step(self.batches(), at(0), StepEvents())
        assert events.calls == {"batch": 2, "forward": 4, "backward": 2, "update": 1}
        assert (float(out.loss), out.samples) == (float(other.loss), 8)
        assert [meter.compute() for meter in made.meters.values()] == [
            meter.compute() for meter in plain.meters.values()
        ]
        assert not equal(weights(made.model), weights(plain.model))
