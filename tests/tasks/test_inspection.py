"""What a model is made of and what it takes, counted by hand."""

import pytest
from harness import SMALL
from torch import nn

from phasetrain.tasks import Position
from phasetrain.tasks.inspection import (
    ROWS,
    checkpoint_bytes,
    memory_estimate,
    modules_of,
    optimizer_bytes,
    shown_modules,
)
from phasetrain.tasks.parts import StepEvents
from phasetrain.testing.build import BuiltRun, build_run

WIDTH = 4


def made(*words: str) -> BuiltRun:
    return build_run([*SMALL, f"MODEL.width={WIDTH}", *words])


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
