"""Giving a run its state back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.checkpoint import LoadedCheckpoint, Manifest
from phasetrain.distributed import Strategy, World
from phasetrain.errors import ChangedError
from phasetrain.hooks.run_state import _digest_buffers, collect_state, restore
from phasetrain.tasks.state import TaskState
from phasetrain.testing import differences


class Part:
    """A stateful part with one weight."""

    def __init__(self, load: Callable[[dict[str, Any]], None] = lambda state: None) -> None:
        self.load_state_dict = load

    def state_dict(self) -> dict[str, Any]:
        return {}


class Run(TaskState):
    """As much of a run as `restore` looks at."""

    def __init__(self, **parts: Any) -> None:
        self.task = self.hooks = self
        self.world = self._world = World()
        self._strategy = Strategy(World())
        self.parts = parts
        self.given: Any = None

    def stateful(self) -> dict[str, Any]:
        return self.parts

    def load_state_dict(self, state: Any) -> None:
        self.given = state

    def state_dict(self) -> dict[str, Any]:
        return {}


def loaded(**parts: Any) -> LoadedCheckpoint:
    manifest = Manifest(1, 1, "r", None, {}, {})
    return LoadedCheckpoint(
        "checkpoints/p0001-s00000000",
        manifest,
        {},
        {"task": parts, "hooks": {"metrics": {"offset": 3}}},
    )


def test_restore_gives_every_part_its_state() -> None:
    model = torch.nn.Linear(1, 1)
    run: Any = Run(model=model)
    restore(
        run,
        loaded(model={"weight": torch.tensor([[7.0]]), "bias": torch.tensor([8.0])}, unknown={}),
    )
    assert (model.weight.item(), model.bias.item()) == (7.0, 8.0)
    assert run.given == {"metrics": {"offset": 3}}


def test_a_part_of_which_the_checkpoint_knows_nothing() -> None:
    run: Any = Run(queue=Part())
    with raises(ChangedError, code="resume.missing_part") as caught:
        restore(run, loaded(model={}))
    assert caught.value.code == "resume.missing_part"


def test_a_part_of_another_shape() -> None:
    run: Any = Run(model=torch.nn.Linear(2, 1))
    with pytest.raises(ChangedError, match=r"'model'[^.]* weight") as caught:
        restore(run, loaded(model={"weight": torch.tensor([[7.0]]), "bias": torch.tensor([8.0])}))
    assert caught.value.exit_code == 3


class Others(World):
    """The second of two processes, of which the main one has other running statistics."""

    def broadcast(self, value: Any) -> Any:
        assert value == {}
        main = Run(model=with_statistics(1.0))
        return _digest_buffers(main.rank_state(), main.module_names())

    def gather(self, value: Any) -> Any:
        self.__dict__["sent"] = value


def with_statistics(mean: float) -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_buffer("same", torch.ones(1000))
    model.register_buffer("mean", torch.tensor([mean]))
    return model


@pytest.mark.parametrize(
    ("mean", "sent"), [(1.0, {}), (2.0, {"model": {"mean": torch.tensor([2.0])}})]
)
def test_only_buffers_that_differ_from_those_of_the_main_process_travel(
    mean: float, sent: dict[str, Any]
) -> None:
    run: Any = Run(model=with_statistics(mean))
    run.world = Others(1, 2)

    collect_state(run)

    assert differences(run.world.sent["task"], sent) == []
