"""Weights that custom parts hold outside of checkpoints are compared on a resume."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from raising import raises
from torch import nn

import phasetrain
from phasetrain.addons.observe.held_weights import check_held_weights
from phasetrain.distributed import World
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook
from phasetrain.optim import Updater
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import TASKS, Parts, Supervised
from phasetrain.tasks.state import Stateful

HERE = __name__
SMALL = ["MODEL={name: mlp, hidden: [4]}", "PHASES.epochs=1", "PHASES.limit.train=4"]
WEIGHTS = nn.Linear(2, 2)


class Own(Supervised):
    """A task that reads a value `held`."""

    held: Any = None

    def forward(self, batch: Any) -> Any:
        if self.held is not None:
            batch.weight = 1
        return super().forward(batch)


class Recomputed(Own):
    recomputed = ("held",)


class Saving(Own):
    def stateful(self) -> dict[str, Stateful]:
        return {**super().stateful(), "held": self.held}


TEACHER: Any = None


class Reading(Own):
    def forward(self, batch: Any) -> Any:
        return TEACHER(batch.input)


def make_reading(value: nn.Module) -> Own:
    globals()["TEACHER"] = value
    return make_task(Reading)


class Average:
    """Saves its module under its own name."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


class Holding(Hook):
    def __init__(self, held: Any) -> None:
        self.held = held

    def on_output(self, run: Any, phase: Any, batch: Any, output: Any) -> Any:
        return output if self.held is None else None


class Observing(Holding):
    observe_only = True


def make_task(task_class: type[Own] = Own, held: Any = None) -> Own:
    model = nn.Linear(3, 2)
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1))
    machine = Machine(torch.device("cpu"))
    task = task_class(Parts(model, nn.MSELoss(), {}, updater, {}, machine, World(), 0))
    task.held = held
    return task


def make_loaded_task(value: nn.Module) -> Own:
    task = make_task()
    task.model.load_state_dict({"weight": value.weight.new_zeros(2, 3), "bias": value.bias})
    return task


CHANGED: list[tuple[Callable[[nn.Linear], Any], str]] = [
    (lambda value: (make_task(held=value), {}), "a module"),
    (lambda value: (make_task(held=make_loaded_task(value)), {}), "the result of phasetrain.load"),
    (lambda value: (make_task(held=value.bias), {}), "the result of torch.load"),
    (lambda value: (make_task(held=[value.weight.detach().numpy()]), {}), "arrays in a list"),
    (lambda value: (make_task(held={"a": {"b": value}}), {}), "a module in mappings"),
    (lambda value: (make_task(), {"a": Holding(value)}), "a module of a hook"),
    (lambda value: (make_reading(value), {}), "a module in a variable"),
]
KEPT: list[tuple[Callable[[nn.Linear], Any], str]] = [
    (lambda value: (make_task(Recomputed, value), {}), "declared"),
    (lambda value: (make_task(Saving, value), {}), "a part of its own"),
    (lambda value: (make_task(Saving, Average(value)), {}), "a module of a part"),
    (lambda value: (make_task(), {"a": Observing(value)}), "a hook that observes"),
]


def compare(
    make: Callable[[nn.Linear], Any], *, exact: bool = True, allow: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Compare a second attempt, whose weights are others, with the first one."""

    def check(value: nn.Linear, loaded: Any) -> dict[str, Any]:
        config = SimpleNamespace(RUN=SimpleNamespace(exact=exact, allow=allow))
        setup = cast("Any", SimpleNamespace(config=config, world=World()))
        return check_held_weights(setup, *make(value), loaded)

    first = check(deepcopy(WEIGHTS), None)
    loaded = SimpleNamespace(promised=first)
    assert check(deepcopy(WEIGHTS), loaded) == first
    other = deepcopy(WEIGHTS)
    with torch.no_grad():
        other.weight[0, 0] += 1e-6
        other.bias[0] += 1e-6
    return check(other, loaded)


@pytest.mark.feature(
    "resume.held_weights",
    "weights that parts load by themselves, such as a teacher's, are compared on a resume",
    "[weights that parts load](machine.md#weights-that-parts-load)",
)
@pytest.mark.parametrize("make", [pytest.param(make, id=what) for make, what in CHANGED])
def test_other_weights_are_rejected(make: Callable[[nn.Linear], Any]) -> None:
    with raises(ChangedError, code="resume.part_changed"):
        compare(make)
    compare(make, exact=False)


@pytest.mark.parametrize("make", [pytest.param(make, id=what) for make, what in KEPT])
def test_saved_and_declared_values_may_differ(make: Callable[[nn.Linear], Any]) -> None:
    compare(make)


def test_tables_may_differ_after_an_allowed_change() -> None:
    compare(CHANGED[2][0], allow=("PHASES",))
    with raises(ChangedError, code="resume.part_changed"):
        compare(CHANGED[0][0], allow=("PHASES",))


@TASKS.register("taught")
class Taught(Supervised):
    """Has a second model with weights."""

    def __init__(self, parts: Parts, make_model: Any, teacher: Any) -> None:
        super().__init__(parts)
        self.teacher = make_model(teacher, "TASK.teacher").eval().requires_grad_(False)

    def forward(self, batch: Any) -> Any:
        out = super().forward(batch)
        out.logs["agreement"] = self.teacher(batch.input).detach().mean()
        return out


def test_second_model_of_a_task_has_weights_that_a_resume_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "teacher.pt"
    model = nn.Linear(64, 10)
    torch.save(model.state_dict(), file)
    words = [
        *SMALL,
        f"RUN.imports=[{HERE}]",
        f"RUN.dir={tmp_path}/run",
        "TASK={name: taught, teacher: {name: " + f"{HERE}.Flat, weights: {file}}}}}",
    ]
    phasetrain.run([*words, "RUN.pause_at=2"])
    assert capsys.readouterr().err.count("all 2 tensors") + _count(tmp_path, "all 2 tensors") == 1
    with torch.no_grad():
        model.bias[0] += 1e-6
    torch.save(model.state_dict(), file)
    with raises(ChangedError, code="resume.part_changed"):
        phasetrain.run(words)
    with pytest.raises(ConfigError, match=r"TASK\.teacher\.weights\.path = 'missing\.pt'"):
        phasetrain.run([*words, "RUN.dir=null", "TASK.teacher.weights=missing.pt"])


class Flat(nn.Linear):
    """Reads images as vectors."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.flatten(1))


def _count(folder: Path, words: str) -> int:
    return (folder / "run" / "log.txt").read_text().count(words)
