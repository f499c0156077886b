"""The state of a task whose weights are sharded: custom modules are sharded and restored as well."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasetrain.addons.sharding.fsdp import FullyShard
from phasetrain.app.fit import ReturnWeights
from phasetrain.distributed import World
from phasetrain.distributed.dtensors import full_tensor, is_dtensor, local_shard
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, SavedTask, Stateful, Task


class WithProjector(Task):
    """A task with a module of its own, which the strategy shards as it does the model."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.projector = nn.Linear(3, 4)
        self.strategy.prepare(self.projector, nn.Identity())

    def forward(self, batch: Batch) -> StepOutput:
        raise NotImplementedError

    def stateful(self) -> dict[str, Stateful]:
        return super().stateful() | {"projector": self.projector}


@pytest.fixture
def task(world: World) -> WithProjector:
    model = nn.Linear(3, 5)
    strategy = FullyShard(world)
    strategy.prepare(model, nn.Identity())
    machine = Machine(torch.device("cpu"))
    parts = Parts(model, nn.Identity(), {}, None, {}, machine, world, 0, strategy=strategy)
    return WithProjector(parts)


def values(module: nn.Module) -> set[float]:
    return {value for one in module.parameters() for value in local_shard(one).flatten().tolist()}


def whole_state() -> dict[str, dict[str, Tensor]]:
    return {
        "model": {"weight": torch.full((5, 3), 2.0), "bias": torch.full((5,), 2.0)},
        "projector": {"weight": torch.full((4, 3), 3.0), "bias": torch.full((4,), 3.0)},
        "loss": {},
    }


def test_custom_module_is_sharded_like_the_model(task: WithProjector) -> None:
    assert all(is_dtensor(one) for one in task.projector.parameters())
    assert task.module_names() == ["model", "loss", "projector"]
    targets = task.restore_targets(whole_state())
    assert [tuple(saved.shape) for saved, _ in targets] == [(5, 3), (5,), (4, 3), (4,)]


def test_custom_module_saved_under_another_strategy_is_restored(task: WithProjector) -> None:
    task.restore(SavedTask(whole_state()))
    assert (values(task.parts.model), values(task.projector)) == ({2.0}, {3.0})


def test_model_of_the_caller_gets_the_whole_weights(task: WithProjector) -> None:
    model = nn.Linear(3, 5)
    hook = ReturnWeights(model)
    run: Any = SimpleNamespace(task=task)
    hook.on_end(run)
    hook.close()
    whole = {name: full_tensor(value) for name, value in task.parts.model.named_parameters()}
    assert all(torch.equal(value, whole[name]) for name, value in model.named_parameters())
