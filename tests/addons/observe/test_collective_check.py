"""With DISTRIBUTED.debug, all ranks report a mismatched collective call at once, with each rank's
line of code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import together

from phasetrain.addons.observe.collective_check import check_collective_order
from phasetrain.distributed import World

MISMATCH = "OrderError: DISTRIBUTED.debug: the ranks do not make the same collective call next ("


def checked(
    function: Callable[[World], Any], *, timeout_seconds: float = 20.0
) -> Callable[[World], Any]:
    """Return the function, called with the check switched on."""

    def call(world: World) -> Any:
        with check_collective_order(replace(world, timeout_seconds=timeout_seconds)):
            return function(world)

    return call


def same(world: World) -> list[Any]:
    """Make every kind of call, the same on all ranks."""
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
    # Since torch 2.13 the name is `all_gather_single`.
    gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
    gather(flat := torch.empty(3), torch.tensor([float(rank)]))
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
    """Sum on one rank, gather on the others."""
    if world.rank == 1:
        dist.all_reduce(torch.ones(3))
    else:
        world.all_gather("x")


def same_shape(world: World) -> list[float]:
    """Sum tensors that do not belong together: torch does not notice."""
    mine = torch.full((1,), 10.0 if world.rank == 1 else 0.25)
    if world.rank == 1:
        dist.all_reduce(mine)
    else:
        dist.all_reduce(mine)
    return mine.tolist()


def other_shape(world: World) -> None:
    dist.all_reduce(torch.ones(2 + world.rank))


def other_reduction(world: World) -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if world.rank == 2 else dist.ReduceOp.SUM)


def alone(world: World) -> None:
    if world.rank == 0:
        dist.barrier()
    else:
        dist.barrier(group=None) if world.rank > 2 else dist.recv(torch.empty(1), src=0)


class TestMatchingCalls:
    def test_equal_calls_pass_with_the_same_results(self) -> None:
        found = together(3, checked(same))
        assert found == together(3, same)
        assert found[1] == [[3.0, 3.0], [1], [1.0], [0.0, 1.0, 2.0], [3.0], ["0", "1", "2"], 0]

    def test_calls_of_a_subgroup_are_not_compared(self) -> None:
        def pair(world: World) -> float:
            group = dist.new_group([0, 1], backend="gloo")
            mine = torch.ones(1)
            if world.rank < 2:
                dist.all_reduce(mine, group=group)
            dist.barrier()
            return mine.item()

        assert together(3, checked(pair)) == [2.0, 2.0, 1.0]


class TestMismatch:
    def test_other_call_is_reported_on_all_ranks(self) -> None:
        reports = together(3, checked(other_call))
        assert len(set(reports)) == 1
        assert reports[0].startswith(MISMATCH + "rank 0: all_gather_object of int64 (1,) at ")
        assert "; rank 1: all_reduce SUM of float32 (3,) at " in reports[0]
        assert reports[0].count("test_collective_check.py:") == 3

    def test_place_with_the_same_shape(self) -> None:
        assert all(one.startswith(MISMATCH) for one in together(3, checked(same_shape)))
        assert together(3, same_shape) == [[10.5]] * 3

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        ("call", "expected"),
        [
            (other_shape, "all_reduce SUM of float32 (4,) at "),
            (other_reduction, "rank 2: all_reduce MAX of "),
        ],
    )
    def test_other_shape_or_reduction(self, call: Callable[[World], None], expected: str) -> None:
        reports = together(3, checked(call))
        assert reports[0].startswith(MISMATCH)
        assert expected in reports[0]


def test_waiting_and_missing_ranks_are_named_at_the_timeout() -> None:
    reports = together(3, checked(alone, timeout_seconds=0.5), timeout_seconds=1.5)
    assert "(rank 0 waits in barrier at " in reports[0]
    assert "missing: 1, 2)" in reports[0]


def test_torch_is_unchanged_afterwards() -> None:
    def compare(world: World) -> list[bool]:
        before = dict(vars(dist.ProcessGroup))
        with check_collective_order(world):
            on = dict(vars(dist.ProcessGroup)) == before
        # Rank 0 serves the store of the ranks: it may end when all have created their group.
        world.all_gather(None)
        return [on, dict(vars(dist.ProcessGroup)) == before]

    assert together(3, compare) == [[False, True]] * 3
