"""Collectives for custom hooks, meters and losses; with a world size of 1 each is the identity.

Every rank has to make the same calls in the same order; `DISTRIBUTED.debug=true` checks this.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phasetrain.distributed.world import World
from phasetrain.runtime.nested import map_tensors

log = logging.getLogger(__name__)

Reduction = Literal["sum", "mean", "min", "max"]


def gather_rows(world: World, value: Any, mask: Tensor | None = None) -> Any:
    """Return the rows of all ranks, in rank order, on every rank.

    Args:
        world: the ranks.
        value: a tensor `(N, ...)`, or a nested list, tuple or dict of them; N may differ between
            ranks.
        mask: rows to keep, bool `(N,)`, as in `Batch.mask`, which excludes padding so that every
            sample is returned once. None: all.

    Returns:
        The same structure with detached tensors `(sum of N, ...)` on the original device.
    """

    def gather(rows: Tensor) -> Tensor:
        rows = rows.detach()
        if mask is not None:
            rows = rows[mask]
        if world.is_single_process:
            return rows
        # As pickled objects on the CPU: dist.all_gather needs the same number of rows on all ranks.
        return torch.cat([part.to(rows.device) for part in world.all_gather(rows.cpu())])

    return map_tensors(value, gather)


def gather_with_gradient(world: World, value: Tensor) -> Tensor:
    """Return the rows of all ranks with a graph, for losses over samples of several ranks.

    The backward pass sums the gradients of all ranks' losses. Strategies average gradients over
    ranks, so a loss that every rank computes over all rows, such as a contrastive one, gets the
    gradient of a single process.

    Args:
        world: the ranks.
        value: `(N, ...)`, the same N on every rank.

    Returns:
        `(N * world size, ...)`, in rank order.
    """
    if world.is_single_process:
        return value
    rows: Tensor = _GatherRows.apply(value, world)  # type: ignore[no-untyped-call]
    return rows


def reduce(world: World, value: Tensor, how: Reduction = "sum") -> Tensor:
    """Return a tensor reduced over all ranks elementwise, detached, on its device."""
    if world.is_single_process:
        return value.detach()
    # A copy, since all_reduce works in place.
    result = value.detach().clone()
    operation = {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.SUM,  # gloo has no AVG
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }
    dist.all_reduce(result, operation[how])
    if how == "mean":
        return result / world.size
    return result


@contextmanager
def rank_zero_first(world: World, *, per_machine: bool = False) -> Iterator[None]:
    """Let rank 0 run a block before all other ranks, to fill a cache for example.

    Args:
        world: the ranks.
        per_machine: local rank 0 of each machine goes first, for caches on local disks.

    Example:
        >>> with rank_zero_first(run.world, per_machine=True):
        ...     unpack(archive, into="/local/cache")
    """
    goes_first = _is_first(world, per_machine=per_machine)
    if not goes_first:
        world.all_gather(None)
    try:
        yield
    finally:
        # Also after an error, or the other ranks would wait until the timeout.
        if goes_first:
            world.all_gather(None)


def log_once(world: World, line: str, *, per_machine: bool = False) -> None:
    """Log a line on rank 0, which prints it, or on local rank 0 of each machine, in its log
    file."""
    if _is_first(world, per_machine=per_machine):
        log.info(line)


def _is_first(world: World, *, per_machine: bool) -> bool:
    return world.local_rank == 0 if per_machine else world.is_main


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
        # A clone: all_reduce works in place, and autograd may hand the same tensor to others.
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient)
        begin = ctx.world.rank * ctx.rows
        return gradient[begin : begin + ctx.rows], None
