"""A train step without `begin_update` comes with a warning if the config has a schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phasetrain
from phasetrain.addons.observe.unscheduled_steps import begins_updates
from phasetrain.tasks import Supervised, Task


class Forgetful(Supervised):
    """Steps by itself."""

    def train_step(self, batches: Any, at: Any, events: Any) -> Any:
        return self.update(self.gradient_pass(batches, at, events), at, events)


class Careful(Forgetful):
    """Has it in a method that the step calls."""

    def train_step(self, batches: Any, at: Any, events: Any) -> Any:
        self.prepare(at)
        return self.update(self.gradient_pass(batches, at, events), at, events)

    def prepare(self, at: Any) -> None:
        self.begin_update(at)


class Extended(Supervised):
    """Adds something to the step of its base class."""

    def train_step(self, batches: Any, at: Any, events: Any) -> Any:
        return super().train_step(batches, at, events)


def logged(step: Any) -> Any:
    def call(self: Any, *args: Any) -> Any:
        return step(self, *args)

    return call


class Decorated(Forgetful):
    """Has a step below a decorator."""

    @logged
    def train_step(self, batches: Any, at: Any, events: Any) -> Any:
        self.begin_update(at)
        return self.update(self.gradient_pass(batches, at, events), at, events)


def prepare(task: Any, at: Any) -> None:
    task.begin_update(at)


class Delegating(Forgetful):
    """Calls a function that does it."""

    def train_step(self, batches: Any, at: Any, events: Any) -> Any:
        prepare(self, at)
        return self.update(self.gradient_pass(batches, at, events), at, events)


@pytest.mark.parametrize(
    ("task_class", "begins"),
    [
        (Supervised, True),
        (Forgetful, False),
        (Careful, True),
        (Extended, True),
        (Decorated, True),
        (Delegating, True),
    ],
)
def test_train_step_calls_begin_update(task_class: type[Task], begins: bool) -> None:
    assert begins_updates(task_class) == begins


@pytest.mark.feature(
    "task.unscheduled",
    "a custom train step that applies no schedule is found before the first step",
    "`begin_update`",
)
@pytest.mark.parametrize(("schedules", "warnings"), [("{lr: {name: cosine}}", 1), ("null", 0)])
def test_schedule_without_effect_is_reported(schedules: str, warnings: int, tmp_path: Path) -> None:
    words = ["PHASES.epochs=1", "PHASES.limit.train=2", "DATA.TEST=null"]
    task = {"TASK": {"name": Forgetful}}
    phasetrain.run([*words, task, f"OPTIMIZER.SCHEDULES={schedules}", f"RUN.dir={tmp_path}"])
    log = (tmp_path / "log.txt").read_text()
    assert log.count("does not call self.begin_update(at)") == warnings


class Advanced(nn.Linear):
    """Has a method that only losses should have."""

    def advance(self, where: float, updates: int) -> None:
        self.where = where


class Stepped(nn.Linear):
    """Has a method of the same name with another meaning."""

    def advance(self, tokens: int) -> None:
        self.tokens = tokens


@pytest.mark.parametrize(("model", "warnings"), [(Advanced, 1), (Stepped, 0)])
def test_advance_of_a_model_is_reported(
    model: type[nn.Linear], warnings: int, tmp_path: Path
) -> None:
    inputs = torch.zeros(8, 4)
    run = {"dir": str(tmp_path), "rehearse": True}
    phasetrain.fit(
        model(4, 2),
        train=TensorDataset(inputs, torch.zeros(8, dtype=torch.int64)),
        loss=nn.CrossEntropyLoss(),
        epochs=1,
        batch_size=8,
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        RUN=run,
    )
    log = (tmp_path / "log.txt").read_text()
    assert log.count("advance(where, updates) of") == warnings
