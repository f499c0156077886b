"""Gradients that are averaged over ranks at the end of each gradient pass, for tasks with several
passes in a step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from phasetrain.distributed.world import World


@contextmanager
def set_aside_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters no gradient, and afterwards add the gradients that they had before."""
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, before in zip(parameters, earlier, strict=True):
        if before is None:
            continue
        if parameter.grad is not None:
            before.add_(parameter.grad)
        parameter.grad = before


def average_gradients(
    parameters: Sequence[Tensor], world: World, dtype: torch.dtype | None = None
) -> None:
    """Replace each gradient by its mean over ranks; every rank must call this.

    A parameter without a gradient on any rank keeps none; one that only some ranks have used counts
    as zero on the others.

    Args:
        parameters: the same ones in the same order on all ranks.
        world: the ranks.
        dtype: dtype in which gradients are sent; None: their own.
    """
    has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    # Over the control group, on the CPU: reading flags of a device would wait for it.
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=world.control)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, has in zip(parameters, has_gradient.tolist(), strict=True):
        if not has:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        # Divided first, as DDP does: the sum of many ranks could overflow half precision.
        sent = flat.to(dtype or flat.dtype).div_(world.size)
        dist.all_reduce(sent)
        parts = torch.split(sent.to(flat.dtype), [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view(gradient.shape))
