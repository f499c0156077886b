"""Processes share a global batch in contiguous slices, even to within one sample, and tell each
other things."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from forked import together

from phasetrain.distributed import World
from phasetrain.errors import ConfigError, PhasetrainError


def test_alone() -> None:
    assert World() == World(rank=0, size=1)
    assert World().is_main
    assert World().shard(3, 10) == (3, 10)


@pytest.mark.parametrize(
    ("size", "shares"),
    [
        (2, [(4, 9), (9, 14)]),
        (3, [(4, 7), (7, 10), (10, 14)]),
        (4, [(4, 6), (6, 9), (9, 11), (11, 14)]),
    ],
)
def test_shares(size: int, shares: list[tuple[int, int]]) -> None:
    assert [World(rank, size).shard(4, 14) for rank in range(size)] == shares
    assert [World(rank, size).is_main for rank in range(size)] == [True] + [False] * (size - 1)


def test_fewer_samples_than_processes_leave_some_without() -> None:
    shares = [World(rank, 4).shard(0, 2) for rank in range(4)]
    assert [end - begin for begin, end in shares] == [0, 1, 0, 1]
    assert shares[-1][1] == 2


def exchanged(world: World) -> list[object]:
    """Return what each kind of exchange gives."""
    return [
        world.broadcast(f"from {world.rank}"),
        world.gather(world.rank * 10),
        world.all_gather((world.rank, "x" * world.rank)),
        world.all_reduce_sum(world.rank + 1),
        world.all_reduce_max(world.rank + 0.5),
        world.run_on_main(lambda: world.rank + 7),
    ]


def test_three_processes_tell_each_other() -> None:
    shared = [(0, ""), (1, "x"), (2, "xx")]
    assert together(3, exchanged) == [
        ["from 0", [0, 10, 20] if rank == 0 else None, shared, 6, 2.5, 7] for rank in range(3)
    ]


def test_one_process_tells_itself() -> None:
    assert exchanged(World()) == ["from 0", [0], [(0, "")], 1, 0.5, 7]


def exchanged_of_device(world: World) -> list[object]:
    """Return the types and values of tensors of a device that the other rank has sent."""
    own = FakeCuda(torch.tensor([1.5, float(world.rank)]))
    state = OrderedDict(weight=own, more=[(own, SimpleNamespace(tensor=own))])
    state._metadata = {"": {"version": 2}}  # as the state of a module
    other = 1 - world.rank
    received: list[Any] = [world.all_gather(state)[other]]
    if world.is_main:
        assert world.broadcast(own) is own
        received += (world.gather(state) or [])[other:]
    else:
        received.append({"weight": world.broadcast(own)})
        assert world.gather(state) is None
    ((more, holder),) = received[0]["more"]
    return [
        [(type(one["weight"]).__name__, one["weight"].tolist()) for one in received],
        [type(more).__name__, type(holder.tensor).__name__, more is received[0]["weight"]],
        received[0]._metadata,
    ]


@pytest.mark.feature("76")
def test_tensors_of_a_device_arrive_on_the_cpu() -> None:
    """torch would restore them on the device index of the sender."""
    nested = [["Tensor", "Tensor", True], {"": {"version": 2}}]
    assert together(2, exchanged_of_device) == [
        [[("Tensor", [1.5, 1.0])] * 2, *nested],
        [[("Tensor", [1.5, 0.0])] * 2, *nested],
    ]


def refused(world: World) -> object:
    """Fail on the main process alone."""

    def fail() -> None:
        raise ConfigError("RUN.dir cannot be written")

    try:
        world.run_on_main(fail)
    except PhasetrainError as error:
        return type(error).__name__, str(error), error.exit_code
    return None


def test_an_error_on_the_main_process_is_one_on_all() -> None:
    told = ("PeerError", "ConfigError: RUN.dir cannot be written", 2)
    assert together(3, refused) == [("ConfigError", "RUN.dir cannot be written", 2), told, told]


def broken(world: World) -> object:
    """Fail on the main process alone with an error that is none of ours."""
    return world.run_on_main(lambda: 1 / 0)


def test_any_error_on_the_main_process_is_one_on_all() -> None:
    told = "PeerError: ZeroDivisionError: division by zero"
    assert together(3, broken) == ["ZeroDivisionError: division by zero", told, told]
