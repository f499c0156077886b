"""A task turns micro-batches into one update, measures, and draws its randomness from the position
alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.meters import METERS, Meter
from phasetrain.optim import Updater
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, Position, Supervised, Task
from phasetrain.tasks.parts import StepEvents
from phasetrain.tasks.step_runner import merge_outputs

CPU = torch.device("cpu")
TRAIN, TEST = Phase(0, "train", 0, 0, 2, 0, 8, 4), Phase(1, "test", 0, 0, 1, 0, 4, 4)
AT = Position("train", updates=3, step=1, where=0.25)


def batch(size: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(size, 3, generator=generator),
        torch.randint(2, (size,), generator=generator),
        torch.arange(size),
        size,
    )


def task(
    model: nn.Module | None = None,
    *,
    precision: Any = "fp32",
    seed: int = 0,
    world: World | None = None,
) -> Supervised:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    meters: dict[str, Meter] = {"accuracy": METERS.build("accuracy"), "loss": METERS.build("loss")}
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1))
    machine = Machine(CPU, precision)
    return Supervised(
        Parts(model, nn.CrossEntropyLoss(), meters, updater, {}, machine, world or World(), seed)
    )


def weights(made: Task) -> list[Tensor]:
    return [value.clone() for value in made.model.state_dict().values()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class TestMergeOutputs:
    def test_single_output_is_returned(self) -> None:
        out = StepOutput(torch.tensor(1.0), 4.0, 4)
        assert merge_outputs([out]) is out

    def test_means_are_weighted(self) -> None:
        found = merge_outputs(
            [
                StepOutput(torch.tensor(1.0), 3.0, 3, logs={"norm": torch.tensor(1.0), "x": 2.0}),
                StepOutput(torch.tensor(5.0), 1.0, 1, logs={"norm": torch.tensor(3.0), "x": 6.0}),
            ]
        )
        assert (float(found.loss), found.weight, found.samples) == (2.0, 4.0, 4)
        assert {name: float(value) for name, value in found.logs.items()} == {"norm": 1.5, "x": 3.0}
        assert (found.output, found.target, found.ids) == (None, None, None)


class TestTrainStep:
    @pytest.mark.feature(
        "9",
        "overridable train step; several backward passes with one update",
        "`Task.train_step`, `Task.gradient_pass`, `Task.update`",
    )
    def test_train_step_updates_the_weights_and_returns_no_tensors_of_the_batch(self) -> None:
        made = task()
        before = weights(made)
        out = made.train_step([batch()], AT, StepEvents())
        assert not equal(weights(made), before)
        assert (out.weight, out.samples, out.output, out.target, out.mask) == (
            4,
            4,
            None,
            None,
            None,
        )
        assert not out.loss.requires_grad
        assert out.ids is not None
        assert out.ids.tolist() == [0, 1, 2, 3]

    def test_uneven_micro_batches_give_the_update_of_the_whole_batch(self) -> None:
        whole, parts = task(nn.Linear(3, 2)), task(nn.Linear(3, 2))
        parts.model.load_state_dict(whole.model.state_dict())
        full = batch(7)
        pieces = [
            Batch(full.input[a:b], full.target[a:b], full.ids[a:b], b - a)
            for a, b in ((0, 3), (3, 6), (6, 7))
        ]
        one, other = (
            whole.train_step([full], AT, StepEvents()),
            parts.train_step(pieces, AT, StepEvents()),
        )
        for first, second in zip(weights(whole), weights(parts), strict=True):
            torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(one.loss, other.loss)
        assert (other.samples, other.weight) == (7, 7)
        assert whole.measure(TRAIN) == pytest.approx(parts.measure(TRAIN))

    def test_dropout_depends_on_the_position_alone(self) -> None:
        def trained(at: Position = AT, noise: int = 0, **known: Any) -> list[Tensor]:
            made = task(**known)
            torch.manual_seed(noise)
            made.train_step([batch()], at, StepEvents())
            return weights(made)

        assert equal(trained(), trained(noise=1))
        others = [
            trained(at=AT._replace(updates=4)),
            trained(at=AT._replace(step=2)),
            trained(at=AT._replace(split="other")),
            trained(seed=1),
            trained(world=World(1, 2)),
        ]
        assert not any(equal(trained(), other) for other in others)
        assert equal(trained(), trained(at=AT._replace(where=0.5)))

    def test_micro_batches_have_different_dropout(self) -> None:
        seen: list[Tensor] = []

        class Look(nn.Dropout):
            def forward(self, value: Tensor) -> Tensor:
                seen.append(super().forward(torch.ones(64)))
                return value

        made = task(nn.Sequential(Look(0.5), nn.Linear(3, 2)))
        made.train_step([batch(), batch()], AT, StepEvents())
        assert not torch.equal(seen[0], seen[1])

    @pytest.mark.parametrize(
        ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    )
    def test_activations_have_the_configured_precision(
        self, precision: Any, dtype: torch.dtype
    ) -> None:
        seen: list[torch.dtype] = []

        class Look(nn.Module):
            def forward(self, value: Tensor) -> Tensor:
                seen.append(value.dtype)
                return value

        made = task(nn.Sequential(nn.Linear(3, 2), Look()), precision=precision)
        out = made.train_step([batch()], AT, StepEvents())
        assert seen == [dtype]
        assert torch.isfinite(out.loss)
        assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float32}


class TestTestStep:
    def test_test_step_changes_nothing_and_keeps_no_graph(self) -> None:
        made = task()
        made.begin(TEST, fresh=True)
        before = weights(made)
        out = made.test_step([batch(), batch(seed=1)], AT._replace(split="test"), StepEvents())
        assert equal(weights(made), before)
        assert all(parameter.grad is None for parameter in made.model.parameters())
        assert (out.samples, out.loss.requires_grad) == (8, False)

    def test_train_step_needs_an_optimizer(self) -> None:
        model = nn.Linear(3, 2)
        made = Supervised(
            Parts(model, nn.CrossEntropyLoss(), {}, None, {}, Machine(CPU), World(), 0)
        )
        made.test_step([batch()], AT, StepEvents())
        assert made.stateful().keys() == {"model", "loss", "generators", "logs", "flags"}
        with pytest.raises(AssertionError, match="optimizer"):
            made.train_step([batch()], AT, StepEvents())


class TestPhases:
    @pytest.mark.feature(
        "111",
        "meters in train and test; torchmetrics; grouped AUROC",
        "`METERS`, `METERS.x: {name: torchmetrics.AUROC}`",
    )
    def test_phases_set_the_mode_and_reset_meters(self) -> None:
        made = task()
        made.begin(TRAIN, fresh=True)
        assert (made.model.training, made.loss.training) == (True, True)
        made.train_step([batch()], AT, StepEvents())
        first = made.measure(TRAIN)
        assert first.keys() == {"accuracy", "loss"}
        made.begin(TRAIN, fresh=False)
        assert made.measure(TRAIN) == first
        made.begin(TEST, fresh=True)
        assert (made.model.training, made.loss.training) == (False, False)
        assert made.measure(TEST) != first
        made.begin(TRAIN, fresh=True)
        assert (made.model.training, made.loss.training) == (True, True)

    def test_meters_can_be_limited_to_tests(self) -> None:
        made = task()
        made.parts = replace(made.parts, train_meters=False)
        made.begin(TRAIN, fresh=True)
        made.train_step([batch()], AT, StepEvents())
        assert made.measure(TRAIN) == {}
        made.begin(TEST, fresh=True)
        made.test_step([batch()], AT._replace(split="test"), StepEvents())
        assert made.measure(TEST).keys() == {"accuracy", "loss"}

    def test_meter_with_several_values_gives_several_metrics(self) -> None:
        class Both(Meter):
            def update(self, out: StepOutput) -> None: ...

            def compute(self) -> dict[str, float]:
                return {"low": 1, "high": 2.0}

        made = task()
        made.meters = {"range": Both()}
        made.begin(TEST, fresh=True)
        assert made.measure(TEST) == {"range_low": 1.0, "range_high": 2.0}

    def test_stateful_lists_the_parts_of_a_checkpoint(self) -> None:
        made = task()
        assert list(made.stateful()) == [
            *("model", "loss", "updater", "generators", "logs", "flags"),
            *("meter.accuracy", "meter.loss"),
        ]
