"""Gradients and the optimizer's state spread over processes (fairscale's OSS and
ShardedDataParallel)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.distributed.strategies.base import (
    STRATEGIES,
    Groups,
    MakeOptimizer,
    Spreading,
    trains,
)
from phasetrain.distributed.strategies.sharded_state import ShardedState, quiet, refuse_types
from phasetrain.distributed.world import World


@STRATEGIES.register("sharded_ddp")
class ShardedDataParallel(ShardedState, Spreading):
    """Each gradient goes to the one process that updates its parameter (Rajbhandari et al. 2020,
    arXiv:1910.02054).

    Takes the memory of optimizer and gradients that `zero` and `ddp` take, divided by the number of
    processes.

    Args:
        world: fact; the processes.
        sync_buffers: give all processes the main one's buffers (running statistics) before each
            update.
    """

    bucket_entries = 0
    """Of fairscale's buckets for small gradients. They have to stay away: the updater drops
    gradients by None, as torch does since 2.0, whereupon fairscale adds up buckets in which
    gradients no longer lie, from the second update on and without a word
    (facebookresearch/fairscale#354)."""

    def __init__(self, world: World, *, sync_buffers: bool = True) -> None:
        super().__init__(world)
        self._sync_buffers = sync_buffers
        self._modules: list[nn.Module] = []
        self._wrapped: Any = None
        self._begins = True

    def optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return an optimizer whose state is spread over the processes.

        Raises:
            ValueError: the parameters are of several types.
        """
        refuse_types("sharded_ddp", groups)
        with quiet():
            from fairscale.optim.oss import OSS

            kind: Any = make
            outer = OSS(groups, optim=kind)
        return self._divided(outer, outer.optim)

    def wrap(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the first module that trains with the gradients of all parameters sent to their
        owners.

        Fairscale's wrapper sees to every parameter of the optimizer, so a second one would reduce
        them twice.
        """
        if not trains(module):
            return module
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)
        self._modules.append(module)
        if self._wrapped is not None:
            return module
        with quiet():
            from fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel as Wrapper

            spread: Any = optimizer
            self._wrapped = wrapped = Wrapper(
                module,
                spread,
                broadcast_buffers=False,  # it would before the last micro-batch of an update
                sync_models_at_startup=False,
                reduce_buffer_size=self.bucket_entries,
                warn_on_trainable_params_changed=False,
            )
        return wrapped

    def step(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context of a micro-batch; only in the last one of an update do gradients go
        round."""
        return self._micro(last=last)

    @contextmanager
    def _micro(self, *, last: bool) -> Iterator[None]:
        if self._begins and self._sync_buffers:
            for module in self._modules:
                for buffer in module.buffers():
                    dist.broadcast(buffer, src=0)
        self._begins = last
        with nullcontext() if last else self._wrapped.no_sync():
            yield

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the Euclidean norm of the whole gradient, 0-d, with the bits that a single process
        would get."""
        first = self._parameters[0]
        found = torch.zeros(2, len(self._parameters), dtype=first.dtype, device=first.device)
        own = [(n, grad) for n, p in enumerate(self._parameters) if (grad := p.grad) is not None]
        if own:
            places = [n for n, _ in own]
            found[0, places] = torch.stack(torch._foreach_norm([grad for _, grad in own]))
            found[1, places] = 1.0
        dist.all_reduce(found)
        norm: Tensor = torch.linalg.vector_norm(found[0][found[1] > 0])
        return norm

    def any(self, flag: Tensor) -> Tensor:
        """Return 1 where the flag of any process is, as each sees the gradients of its own
        parameters."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag
