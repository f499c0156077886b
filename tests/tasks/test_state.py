"""Saving and restoring a task: every part by its kind, whatever its name."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from phasetrain.distributed import Placement, World, join_process_group
from phasetrain.distributed.dtensors import is_dtensor, local_shard
from phasetrain.distributed.strategies import FullyShard
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import ChangedError
from phasetrain.meters import METERS
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, SavedTask, Stateful, Task


class WithProjector(Task):
    """A task with a module of its own, which the strategy shards as it does the model."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        torch.manual_seed(1)
        self.projector = nn.Linear(3, 4)
        self.strategy.prepare(self.projector, nn.Identity())

    def forward(self, batch: Batch) -> StepOutput:
        raise NotImplementedError

    def stateful(self) -> dict[str, Stateful]:
        return super().stateful() | {"projector": self.projector}


@pytest.fixture
def world() -> Iterator[World]:
    device = torch.device("cpu")
    with join_process_group(Placement(), device, timeout_seconds=30, alone=True) as world:
        yield world


@pytest.fixture
def task(world: World) -> WithProjector:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    strategy = FullyShard(world)
    strategy.prepare(model, nn.Identity())
    machine = Machine(torch.device("cpu"))
    meters = {"loss": METERS.build("loss")}
    parts = Parts(model, nn.Identity(), meters, None, {}, machine, world, 0, strategy=strategy)
    return WithProjector(parts)


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            local_shard(parameter).fill_(value)


def values(module: nn.Module) -> set[float]:
    return {value for one in module.parameters() for value in local_shard(one).flatten().tolist()}


def whole_state() -> dict[str, dict[str, Tensor]]:
    return {
        "model": {"weight": torch.full((5, 3), 2.0), "bias": torch.full((5,), 2.0)},
        "projector": {"weight": torch.full((4, 3), 3.0), "bias": torch.full((4,), 3.0)},
        "loss": {},
        "meter.loss": METERS.build("loss").state_dict(),
    }


def test_custom_module_is_sharded_like_the_model(task: WithProjector) -> None:
    assert all(is_dtensor(one) for one in task.projector.parameters())
    assert task.module_names() == ["model", "loss", "projector"]
    targets = task.restore_targets(whole_state())
    assert [tuple(saved.shape) for saved, _ in targets] == [(5, 3), (5,), (4, 3), (4,)]


def test_custom_module_saved_under_another_strategy_is_restored_under_fsdp(
    task: WithProjector,
) -> None:
    task.restore(SavedTask(whole_state()))
    assert (values(task.parts.model), values(task.projector)) == ({2.0}, {3.0})


def test_restoring_learned_state_keeps_meters(task: WithProjector) -> None:
    meter = task.meters["loss"]
    meter.update(StepOutput(torch.tensor(2.0), 1.0, 1))
    task.restore(SavedTask(whole_state()), "learned")
    assert (values(task.projector), meter.compute()) == ({3.0}, 2.0)
    task.restore(SavedTask(whole_state()))
    assert meter.compute() != 2.0


def test_missing_part_is_named(task: WithProjector) -> None:
    state = whole_state()
    del state["projector"]
    with pytest.raises(ChangedError, match="'projector'") as caught:
        task.restore(SavedTask(state))
    assert caught.value.code == "resume.missing_part"
