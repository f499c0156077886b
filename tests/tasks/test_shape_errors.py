"""Exhausted memory is not reported as an error of the config; mismatched shapes are."""

import errno
from typing import Any

import pytest
import torch
from torch import nn

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import ConfigError, is_out_of_memory
from phasetrain.meters import Meter
from phasetrain.tasks import Position, Task
from phasetrain.tasks.parts import StepEvents
from phasetrain.tasks.shape_errors import (
    describe_failed_forward,
    raise_unless_shape_error,
    shorten_shape_error,
)
from phasetrain.testing.build import build_run

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"
CPU_TEXT = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"
MEMORY = [
    torch.OutOfMemoryError(CUDA_TEXT),
    RuntimeError(CPU_TEXT),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
AT = Position("train", 0, 0, 0.0, 16)


@pytest.fixture(params=MEMORY, ids=["cuda", "cpu", "python", "system"])
def error(request: pytest.FixtureRequest) -> Exception:
    made: Exception = request.param
    return made


def train(words: list[str], **broken: Any) -> None:
    """Run a train step of a task of which one part raises an error."""
    made = build_run(["DATA.TRAIN.batch_size=16", "DATA.TEST.batch_size=16", *words])
    task = made.task
    task.begin(made.plan.phases[0], fresh=True)
    for name, part in broken.items():
        setattr(task, name, part)
    (batch,) = next(iter(task.batches(made.plan.phases[0], 0)))
    task.train_step([batch], AT, StepEvents())


class Raising(nn.Module):
    """Raises an error instead of computing."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, *inputs: Any) -> Any:
        raise self.error


class RaisingMeter(Meter):
    """Raises an error instead of measuring."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def update(self, out: StepOutput) -> None:
        raise self.error

    def compute(self) -> float:
        return 0.0


def test_exhausted_memory_is_recognized_by_type_and_text(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(
    "experiment", ["digits", pytest.param("digits_simclr", marks=pytest.mark.addon("vision"))]
)
@pytest.mark.parametrize("part", ["model", "loss"])
def test_exhausted_memory_in_a_train_step_is_no_config_error(
    experiment: str, part: str, error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        train([f"experiment={experiment}"], **{part: Raising(error)})
    assert caught.value is error


def test_exhausted_memory_in_a_meter_is_no_config_error(error: Exception) -> None:
    task = build_run(["DATA.TRAIN.batch_size=16"]).task
    task._measured = {"broken": RaisingMeter(error)}
    with pytest.raises(type(error)) as caught:
        show(task)
    assert caught.value is error


def test_error_of_a_meter_is_a_config_error() -> None:
    task = build_run(["DATA.TRAIN.batch_size=16"]).task
    task._measured = {"broken": RaisingMeter(ValueError("wrong shape"))}
    with pytest.raises(ConfigError) as caught:
        show(task)
    assert caught.value.key == "METERS.broken"


def show(task: Task) -> None:
    batch = Batch(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64), torch.arange(2), 2)
    task.train_step([batch], AT, StepEvents())


class Narrow(nn.Module):
    """A model with a layer that does not take the output of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(33, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(x)


def fail(model: nn.Module, batch: Any) -> Exception:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model(batch)
    return caught.value


@pytest.mark.feature("errors.user_code")
def test_failed_forward_names_the_layer_its_input_and_few_samples() -> None:
    batch = torch.zeros(8, 1, 8, 8)
    error = fail(model := Narrow(), batch)
    text = describe_failed_forward(model, error, batch, range(100, 108))
    assert (
        "Narrow fails in head: Linear(in_features=33, out_features=10, bias=True) on (8, 32)"
        in text
    )
    assert "(8, 1, 8, 8) float32 of samples 100, 101, 102 and 5 more" in text


def test_failed_forward_of_a_nested_layer_has_its_whole_name() -> None:
    batch = torch.zeros(8, 60)
    error = fail(model := Narrow(), batch)
    assert "in body.1: Linear(" in describe_failed_forward(model, error, batch)


def test_failure_in_the_code_of_the_model_itself_names_its_input_only() -> None:
    error = ValueError("odd")
    batch = {"a": torch.zeros(2, 3), "b": [torch.zeros(2, dtype=torch.int64)]}
    text = describe_failed_forward(fails := Raising(error), fail(fails, batch), batch)
    assert text == "MODEL: Raising fails on the input {a: (2, 3) float32, b: [(2,) int64]}: odd"


def test_error_of_a_worker_is_raised_and_a_misfit_is_not() -> None:
    raise_unless_shape_error(RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        raise_unless_shape_error(RuntimeError("DataLoader worker (pid 1) exited unexpectedly"))


def test_two_names_of_each_kind_of_mismatch_are_shown() -> None:
    saved = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    model = nn.Sequential(*(nn.Linear(2, 3 if place < 3 else 2) for place in range(9)))
    del model[4:6]
    state = {f"old.{name}": one for name, one in saved.state_dict().items()} | saved.state_dict()
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    assert shorten_shape_error(caught.value) == (
        "missing: 6.weight, 6.bias; unexpected: old.0.weight, old.0.bias and 10 more; "
        "of another shape: 0.weight, 0.bias and 4 more"
    )


def test_other_errors_keep_their_first_line() -> None:
    assert shorten_shape_error(KeyError("weight")) == "'weight'"
    assert shorten_shape_error(ValueError("two optimizers\nwith details")) == "two optimizers"
    assert shorten_shape_error(RuntimeError()) == "RuntimeError"
