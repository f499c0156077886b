"""Saving and restoring a task: every part by its kind, whatever its name."""

import pytest
import torch
from torch import Tensor, nn

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import ChangedError
from phasetrain.meters import METERS
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, SavedTask, Stateful, Task


class WithProjector(Task):
    """A task with a module of its own."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.projector = nn.Linear(3, 4)

    def forward(self, batch: Batch) -> StepOutput:
        raise NotImplementedError

    def stateful(self) -> dict[str, Stateful]:
        return super().stateful() | {"projector": self.projector}


@pytest.fixture
def task() -> WithProjector:
    machine = Machine(torch.device("cpu"))
    meters = {"loss": METERS.build("loss")}
    parts = Parts(nn.Linear(3, 5), nn.Identity(), meters, None, {}, machine, World(), 0)
    return WithProjector(parts)


def values(module: nn.Module) -> set[float]:
    return {value for one in module.parameters() for value in one.flatten().tolist()}


def saved_state() -> dict[str, dict[str, Tensor]]:
    return {
        "model": {"weight": torch.full((5, 3), 2.0), "bias": torch.full((5,), 2.0)},
        "projector": {"weight": torch.full((4, 3), 3.0), "bias": torch.full((4,), 3.0)},
        "loss": {},
        "meter.loss": METERS.build("loss").state_dict(),
    }


def test_custom_module_is_restored_with_the_model(task: WithProjector) -> None:
    assert task.module_names() == ["model", "loss", "projector"]
    task.restore(SavedTask(saved_state()))
    assert (values(task.parts.model), values(task.projector)) == ({2.0}, {3.0})


def test_restoring_learned_state_keeps_meters(task: WithProjector) -> None:
    meter = task.meters["loss"]
    meter.update(StepOutput(torch.tensor(2.0), 1.0, 1))
    task.restore(SavedTask(saved_state()), "learned")
    assert (values(task.projector), meter.compute()) == ({3.0}, 2.0)
    task.restore(SavedTask(saved_state()))
    assert meter.compute() != 2.0


def test_missing_part_is_named(task: WithProjector) -> None:
    state = saved_state()
    del state["projector"]
    with pytest.raises(ChangedError, match="'projector'") as caught:
        task.restore(SavedTask(state))
    assert caught.value.code == "resume.missing_part"
