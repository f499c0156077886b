"""What users' hooks, meters and losses exchange between processes; on one process each is the
identity.

Every process has to make the same calls in the same order; `DISTRIBUTED.debug=true` looks for
mistakes.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phasetrain.distributed.world import World

log = logging.getLogger(__name__)

Reduction = Literal["sum", "mean", "min", "max"]


def gather_rows(world: World, value: Any, mask: Tensor | None = None) -> Any:
    """Return the rows of all processes, in the order of their numbers, on every process.

    Args:
        world: the processes.
        value: a tensor `(N, ...)`, or a nested list, tuple or dict of them; N may differ between
            processes.
        mask: which rows count, bool `(N,)`, as in `Batch.mask`: rows that only stand in for others
            are left out, so that no sample is there twice. None: all.

    Returns:
        The same form with tensors `(sum of N, ...)` on the device where they were, without graph.
    """
    if isinstance(value, dict):
        return {key: gather_rows(world, item, mask) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_rows(world, item, mask) for item in value)
    rows = value.detach() if mask is None else value.detach()[mask]
    if world.is_single_process:
        return rows
    return torch.cat([part.to(rows.device) for part in world.all_gather(rows.cpu())])


def gather_with_gradient(world: World, value: Tensor) -> Tensor:
    """Return the rows of all processes with a graph: gradients of all processes' losses come back
    added up.

    For losses over samples of other processes, contrastive ones say. Strategies average gradients
    over processes, so a loss that each process computes over all rows gets its own gradient back.

    Args:
        world: the processes.
        value: `(N, ...)`, the same N on every process.

    Returns:
        `(N * processes, ...)`, in the order of the processes.
    """
    if world.is_single_process:
        return value
    gathered: Tensor = _GatherRows.apply(value, world)  # type: ignore[no-untyped-call]
    return gathered


def reduce(world: World, value: Tensor, how: Reduction = "sum") -> Tensor:
    """Return a tensor reduced over all processes, entry by entry, without graph, on the device
    where it was."""
    if world.is_single_process:
        return value.detach()
    found = value.detach().clone()
    operation = {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }
    dist.all_reduce(found, operation[how])
    if how == "mean":
        return found / world.size
    return found


@contextmanager
def rank_zero_first(world: World, *, per_machine: bool = False) -> Iterator[None]:
    """Let the main process go through a block before all others do: the first one fills a cache,
    say.

    Args:
        world: the processes.
        per_machine: the first process of each machine goes first, for what lies on its own disk.

    Example:
        >>> with rank_zero_first(run.world, per_machine=True):
        ...     unpack(archive, into="/local/cache")
    """
    first = world.local_rank == 0 if per_machine else world.is_main
    if not first:
        world.all_gather(None)
    try:
        yield
    finally:
        if first:
            world.all_gather(None)


def log_once(world: World, line: str, *, per_machine: bool = False) -> None:
    """Log a line on the main process, which prints it, or on the first one of each machine, in its
    own log file."""
    if world.local_rank == 0 if per_machine else world.is_main:
        log.info(line)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World) -> Tensor:
        ctx.world = world
        ctx.rows = len(value)
        parts = [torch.empty_like(value) for _ in range(world.size)]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole)
        begin = ctx.world.rank * ctx.rows
        return whole[begin : begin + ctx.rows], None
