"""In debug mode processes that make different collective calls hear of it at once, with the places
in the code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import together

from phasetrain.distributed import World, guarded

MISMATCH = (
    "OrderError: DISTRIBUTED.debug: the processes do not make the same collective call next ("
)


def watched(
    function: Callable[[World], Any], *, debug: bool = True, timeout_seconds: float = 20.0
) -> Callable[[World], Any]:
    """Return the function, called under the guard."""

    def call(world: World) -> Any:
        with guarded(world, timeout_seconds=timeout_seconds, debug=debug):
            return function(world)

    return call


def same(world: World) -> list[Any]:
    """Make every kind of call, the same on all processes."""
    rank, size = world.rank, world.size
    summed, many = torch.ones(2), [torch.empty(1) for _ in range(size)]
    dist.all_reduce(summed)
    dist.all_gather(many, torch.tensor([float(rank)]))
    dist.broadcast(first := torch.tensor([rank]), src=1)
    dist.reduce(torch.ones(1), dst=2)
    dist.gather(torch.ones(1), many if rank == 0 else None, dst=0)
    dist.scatter(
        part := torch.empty(1),
        [torch.tensor([float(n)]) for n in range(size)] if rank == 0 else None,
    )
    dist.all_to_all_single(torch.empty(3), torch.ones(3))
    dist.all_gather_single(flat := torch.empty(3), torch.tensor([float(rank)]))
    work = dist.all_reduce(late := torch.ones(1), async_op=True)
    dist.barrier()
    work.wait()
    objects = world.all_gather(str(rank))
    return [
        summed.tolist(),
        first.tolist(),
        part.tolist(),
        flat.tolist(),
        late.tolist(),
        objects,
        world.broadcast(rank),
    ]


def other_call(world: World) -> None:
    """Sum on one process, gather on others."""
    if world.rank == 1:
        dist.all_reduce(torch.ones(3))
    else:
        world.all_gather("x")


def same_shape(world: World) -> list[float]:
    """Sum what does not belong together: torch does not notice."""
    mine = torch.full((1,), 10.0 if world.rank == 1 else 0.25)
    if world.rank == 1:
        dist.all_reduce(mine)
    else:
        dist.all_reduce(mine)
    return mine.tolist()


def other_shape(world: World) -> None:
    dist.all_reduce(torch.ones(2 + world.rank))


def other_sum(world: World) -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if world.rank == 2 else dist.ReduceOp.SUM)


def alone(world: World) -> None:
    if world.rank == 0:
        dist.barrier()
    else:
        dist.barrier(group=None) if world.rank > 2 else dist.recv(torch.empty(1), src=0)


class TestTheSame:
    def test_equal_calls_pass_and_have_the_same_results(self) -> None:
        found = together(3, watched(same))
        assert found == together(3, watched(same, debug=False))
        assert found[1] == [[3.0, 3.0], [1], [1.0], [0.0, 1.0, 2.0], [3.0], ["0", "1", "2"], 0]

    def test_threads_and_groups_of_a_part_have_an_order_of_their_own(self) -> None:
        def pair(world: World) -> float:
            group = dist.new_group([0, 1], backend="gloo")
            mine = torch.ones(1)
            if world.rank < 2:
                dist.all_reduce(mine, group=group)
            dist.barrier()
            return mine.item()

        assert together(3, watched(pair)) == [2.0, 2.0, 1.0]


class TestAnother:
    def test_call(self) -> None:
        said = together(3, watched(other_call))
        assert len(set(said)) == 1
        assert said[0].startswith(MISMATCH + "process 0: all_gather_object of int64 (1,) at ")
        assert "; process 1: all_reduce SUM of float32 (3,) at " in said[0]
        assert said[0].count("test_order.py:") == 3

    def test_place_with_the_same_shape(self) -> None:
        assert all(said.startswith(MISMATCH) for said in together(3, watched(same_shape)))
        assert together(3, watched(same_shape, debug=False)) == [[10.5]] * 3

    @pytest.mark.parametrize(
        ("call", "told"),
        [
            (other_shape, "all_reduce SUM of float32 (4,) at "),
            (other_sum, "process 2: all_reduce MAX of "),
        ],
    )
    def test_shape_or_sum(self, call: Callable[[World], None], told: str) -> None:
        said = together(3, watched(call))
        assert said[0].startswith(MISMATCH)
        assert told in said[0]


def test_who_waits_is_told_at_the_timeout() -> None:
    said = together(3, watched(alone, timeout_seconds=0.5), timeout_seconds=1.5)
    assert "not all 3 processes have come to the same collective call" in said[0]
    assert "(process 0 waits in barrier at " in said[0]
    assert "not there: 1, 2)" in said[0]


def test_torch_is_as_before_afterwards_and_where_it_is_off() -> None:
    def kept(world: World) -> list[bool]:
        before = dict(vars(dist.ProcessGroup))
        with guarded(world, timeout_seconds=5.0, debug=False):
            off = dict(vars(dist.ProcessGroup)) == before
        with guarded(world, timeout_seconds=5.0):
            on = dict(vars(dist.ProcessGroup)) == before
        return [off, on, dict(vars(dist.ProcessGroup)) == before]

    assert together(3, kept) == [[True, False, True]] * 3
    assert kept(World()) == [True, True, True]
