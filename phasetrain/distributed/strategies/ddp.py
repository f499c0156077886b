"""Every process holds the whole model; gradients are averaged (torch's DistributedDataParallel)."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from math import inf
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from phasetrain.distributed.strategies.base import (
    _NOTHING,
    STRATEGIES,
    Spreading,
    device_of,
    trains,
)
from phasetrain.distributed.world import World

COMMUNICATION: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
)
"""How gradients are made smaller on their way, beside `none`; none of these keeps a state."""


@STRATEGIES.register("ddp")
class DataParallel(Spreading):
    """Averages gradients in buckets while the backward pass goes on (Li et al. 2020,
    arXiv:2006.15704).

    Torch puts the buckets in another order after the first backward pass, and a sum in another
    order has other last bits: so two passes go before every start, fresh or resumed.

    Args:
        world: fact; the processes.
        bucket_cap_mb: size of a bucket in MiB; changes in which order gradients are added, so also
            bits.
        sync_buffers: give all processes the main one's buffers (running statistics) before each
            forward pass.
        find_unused_parameters: look for parameters that a loss does not depend on; costs a walk
            through the graph.
        static_graph: the graph is the same in every update; allows torch to save work.
        gradient_as_bucket_view: gradients lie in the buckets, which saves a copy and as much
            memory.
        communication: fact; what gradients are rounded to while they go round
            (`DISTRIBUTED.communication`).
    """

    warms_up = True

    def __init__(
        self,
        world: World,
        *,
        bucket_cap_mb: float = 25.0,
        sync_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        communication: str = "none",
    ) -> None:
        super().__init__(world)
        if not 0 < bucket_cap_mb < inf:
            raise ValueError(f"bucket_cap_mb = {bucket_cap_mb}: expected more than 0")
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "forward_sync_buffers": sync_buffers,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._communication = communication
        self._wrapped: list[DistributedDataParallel] = []

    def wrap(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the module with its gradients averaged; one that trains nothing stays as it is."""
        if not trains(module):
            return module
        devices = [device_of(module)] if device_of(module).type == "cuda" else None
        wrapped = DistributedDataParallel(module, device_ids=devices, **self._options)
        if self._communication != "none" and not self.world.is_single_process:
            wrapped.register_comm_hook(None, COMMUNICATION[self._communication])
        self._wrapped.append(wrapped)
        return wrapped

    def step(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context of a micro-batch; only in the last one of an update do gradients go
        round."""
        if last:
            return _NOTHING
        stack = ExitStack()
        for wrapped in self._wrapped:
            stack.enter_context(wrapped.no_sync())
        return stack
