"""What a model is made of and what it takes, counted by hand."""

import pytest
from harness import SMALL
from torch import Tensor, nn

from phasetrain.tasks import Position
from phasetrain.tasks.inspection import (
    ROWS,
    ModuleRow,
    checkpoint_bytes,
    inspect,
    memory_estimate,
    modules_of,
    optimizer_bytes,
    shown_modules,
)
from phasetrain.tasks.parts import StepEvents
from phasetrain.testing.build import BuiltRun, build_run

WIDTH = 4


class Spared(nn.Module):
    """A linear model with a layer that its output does not depend on."""

    def __init__(self, *, spare: bool) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.spare = nn.Linear(64, 10) if spare else None

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


def made(*words: str) -> BuiltRun:
    return build_run([*SMALL, f"MODEL.width={WIDTH}", *words])


@pytest.mark.feature("11")
def test_table_of_a_small_network_equals_hand_counted_values() -> None:
    one = made()
    batch = next(iter(one.task.batches(one.plan.phases[0], 0)))[0]
    found = inspect(one.task, one.plan.phases[0], batch)
    rows = {row.name: row for row in found.modules}
    assert rows["features.0"] == ModuleRow(
        "features.0", "Conv2d", 36, 36, "(N, 4, 8, 8)", 24 * 256 * 4, 2 * 36 * 64
    )
    assert rows["head"] == ModuleRow("head", "Linear", 90, 90, "(N, 10)", 24 * 40, 2 * 80)
    assert found.forward_flops == rows[""].flops == 2 * (36 * 64 + 288 * 16 + 576 * 4 + 80)
    # A backward pass takes as much for the weights and as much for the inputs, which the first
    # layer's has not.
    assert found.train_flops == 3 * 18592 - 2 * 36 * 64
    leaves = (
        3 * (4 * 64) + 3 * (8 * 16) + 3 * (8 * 4) + 8 + 10
    )  # values per sample: three blocks, dropout, head
    assert found.activation_bytes == 24 * 4 * (leaves + 64)
    assert all(parameter.grad is None for parameter in one.task.model.parameters())


def test_frozen_parameters_are_not_counted_as_trained() -> None:
    one = made("MODEL.freeze=['features.0']")
    rows = {row.name: row for row in modules_of(one.task.parts.model)}
    assert (rows["features.0"].parameters, rows["features.0"].trained) == (36, 0)
    assert rows[""].trained == rows[""].parameters - 36
    assert (rows["head"].output, rows["head"].flops) == (None, None)


def test_memory() -> None:
    for words, each in (
        (["OPTIMIZER.momentum=0.0", "OPTIMIZER.nesterov=false"], 0),
        (["OPTIMIZER.momentum=0.9"], 1),
        (["OPTIMIZER={name: adamw}", "MODEL.ema={}"], 2),
    ):
        one = made(*words)
        size = 4 * sum(p.numel() for p in one.task.model.parameters())
        found = memory_estimate(one.task.parts)
        assert (found["gradients"], found["optimizer"], found["activations"]) == (
            size,
            each * size,
            None,
        )
        assert found["averages"] == (found["weights"] if "MODEL.ema={}" in words else 0)
        phase, batches = one.plan.phases[0], next(iter(one.task.batches(one.plan.phases[0], 0)))
        one.task.begin(phase, fresh=True)
        one.task.train_step(batches, Position("train", 0, 0, 0.0, 24), StepEvents())
        assert optimizer_bytes(one.task.parts) == pytest.approx(
            each * size, rel=0.02
        )  # and what it counts steps with


def test_averages_enlarge_the_checkpoint() -> None:
    assert checkpoint_bytes(made("MODEL.ema={}").task.parts) > 1.4 * checkpoint_bytes(
        made().task.parts
    )


def test_large_models_are_shown_to_a_smaller_depth() -> None:
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(12)))
    rows = modules_of(deep)
    assert len(rows) == 1 + 12 * 3
    assert [row.name for row in shown_modules(rows)] == ["", *map(str, range(12))]
    flat = modules_of(nn.Sequential(*(nn.ReLU() for _ in range(50))))
    assert len(shown_modules(flat)) == ROWS


def test_modules_that_are_not_called_have_no_output() -> None:
    rows = modules_of(nn.ModuleDict({"used": nn.Linear(2, 3), "none": nn.Identity()}))
    assert [(row.name, row.parameters, row.output) for row in rows] == [
        ("", 9, None),
        ("used", 9, None),
        ("none", 0, None),
    ]


@pytest.mark.parametrize(("spare", "lines"), [(True, 1), (False, 0)])
def test_parameters_that_the_loss_does_not_use_are_named(
    spare: bool, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    words = (
        f"MODEL={{name: {__name__}.Spared, spare: {spare}}}",
        "METERS.loss=null",
    )
    built = build_run([*SMALL[:5], *words])
    batch = next(iter(built.task.batches(built.plan.phases[0], 0)))[0]
    with caplog.at_level("INFO"):
        inspect(built.task, built.plan.phases[0], batch)
    hints = [one.getMessage() for one in caplog.records if "find_unused" in one.getMessage()]
    assert len(hints) == lines
    assert all("spare.weight, spare.bias" in hint for hint in hints)
