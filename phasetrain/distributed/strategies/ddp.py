"""Every rank holds the whole model; gradients are averaged (torch's DistributedDataParallel)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from inspect import signature
from math import inf
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from phasetrain.distributed.strategies.base import (
    NO_CONTEXT,
    STRATEGIES,
    GradientAveraging,
    broadcast_state,
    device_of,
    is_trainable,
    set_aside_gradients,
)
from phasetrain.distributed.world import World

COMMUNICATION: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
)
"""Gradient compression; only stateless hooks, since their state would be in no checkpoint."""

SENT: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
)
"""Gradient compression at the end of a gradient pass: the dtype in which gradients are sent."""


@STRATEGIES.register("ddp")
@dataclass(eq=False, repr=False)
class DataParallel(GradientAveraging):
    """Averages gradients in buckets while the backward pass is still running (Li et al. 2020,
    arXiv:2006.15704).

    Args:
        world: fact; the ranks.
        bucket_cap_mb: size of a bucket in MiB; changes the order in which gradients are added, and
            with it the last bits.
        sync_buffers: copy rank 0's buffers (running statistics) to all ranks before each forward
            pass.
        find_unused_parameters: search the graph for parameters that the loss does not depend on;
            costs a traversal per pass.
        static_graph: the graph is the same in every update, which lets torch save work.
        gradient_as_bucket_view: gradients are views into the buckets, which saves a copy of them.
        communication: fact; dtype in which gradients are reduced (`DISTRIBUTED.communication`).
    """

    # Torch rebuilds the buckets in the order of the first backward pass, and another order of
    # additions has other last bits. Two passes before every start, fresh or resumed, make the
    # order the same in both.
    needs_warmup = True

    world: World
    _: KW_ONLY
    bucket_cap_mb: float = 25.0
    sync_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    communication: str = "none"

    def __post_init__(self) -> None:
        super().__init__(self.world)
        if not 0 < self.bucket_cap_mb < inf:
            raise ValueError(f"bucket_cap_mb = {self.bucket_cap_mb}: expected more than 0")
        self._wrapped: list[DistributedDataParallel] = []
        self._reduces_after_passes = False
        self._modules: list[nn.Module] = []

    def reduce_after_passes(self) -> None:
        """Leave modules unwrapped, and average gradients at the end of each gradient pass."""
        # DDP reduces once per forward pass of the whole module and waits for all of its
        # parameters; the passes of such a task call parts of the model, and may skip some.
        self._reduces_after_passes = True
        self.needs_warmup = False

    def wrap_module(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the module wrapped in DDP, or the module itself if it has nothing to train."""
        if not is_trainable(module):
            return module
        if self._reduces_after_passes:
            broadcast_state(module)
            self._modules.append(module)
            return module
        device = device_of(module)
        wrapped = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            **self._buffer_setting(module),
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        if self.communication != "none" and not self.world.is_single_process:
            wrapped.register_comm_hook(None, COMMUNICATION[self.communication])
        self._wrapped.append(wrapped)
        return wrapped

    def _buffer_setting(self, module: nn.Module) -> dict[str, Any]:
        """Return the argument of DDP that says whether forward passes broadcast buffers."""
        if "forward_sync_buffers" in signature(DistributedDataParallel).parameters:
            return {"forward_sync_buffers": self.sync_buffers}
        # Before torch 2.13 the argument was `broadcast_buffers`, which is deprecated since. Forward
        # passes do the same with both. But if it is false, wrapping does not give the ranks the
        # buffers of rank 0 either, so that the first updates of ranks with other buffers would
        # have other bits than with a later torch.
        if not self.sync_buffers:
            broadcast_state(module)
        return {"broadcast_buffers": self.sync_buffers}

    @contextmanager
    def gradient_pass(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Return the context of a gradient pass; at its end gradients are averaged."""
        with set_aside_gradients(parameters):
            if self.sync_buffers:
                self.prepare_test(*self._modules)
            yield
            average_gradients(parameters, self.world, SENT[self.communication])

    def micro_batch(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context of a micro-batch; gradients are reduced in the last one."""
        if last:
            return NO_CONTEXT
        stack = ExitStack()
        for wrapped in self._wrapped:
            stack.enter_context(wrapped.no_sync())
        return stack


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
