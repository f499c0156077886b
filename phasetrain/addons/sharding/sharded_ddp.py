"""Gradients and the optimizer's state sharded over ranks (fairscale's OSS and
ShardedDataParallel)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.addons.sharding.sharded_state import (
    ShardedOptimizerState,
    reject_mixed_dtypes,
    silence_import,
)
from phasetrain.distributed import STRATEGIES, World
from phasetrain.distributed.strategies.base import (
    GradientAveraging,
    Groups,
    MakeOptimizer,
    broadcast_state,
    is_trainable,
)


@STRATEGIES.register("sharded_ddp")
class ShardedDataParallel(GradientAveraging):
    """Each gradient is reduced to the one rank that updates its parameter (Rajbhandari et al.
    2020, arXiv:1910.02054).

    Each rank holds 1/world size of the gradients and of the optimizer's state.

    Args:
        world: fact; the ranks.
        sync_buffers: copy rank 0's buffers (running statistics) to all ranks before each update.
    """

    shards_optimizer = True

    # No buckets for small gradients. The updater sets gradients to None, as torch does since 2.0,
    # and from the second update on fairscale then silently reduces buckets that no longer contain
    # the gradients (facebookresearch/fairscale#354).
    bucket_entries = 0

    def __init__(self, world: World, *, sync_buffers: bool = True) -> None:
        super().__init__(world)
        self.state = self._sharded = ShardedOptimizerState(world)
        self._sync_buffers = sync_buffers
        self._modules: list[nn.Module] = []
        self._wrapped: Any = None
        self._is_first_micro_batch = True

    def make_optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return an optimizer whose state is sharded over ranks.

        Raises:
            ValueError: the parameters have several dtypes.
        """
        reject_mixed_dtypes("sharded_ddp", groups)
        with silence_import():
            from fairscale.optim.oss import OSS

            optimizer_class: Any = make
            optimizer = OSS(groups, optim=optimizer_class)
        return self._sharded.attach(optimizer, optimizer.optim)

    def wrap_module(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the first trainable module wrapped, so that gradients reach their owners."""
        if not is_trainable(module):
            return module
        broadcast_state(module)
        self._modules.append(module)
        # Fairscale's wrapper reduces every parameter of the optimizer, those of other modules as
        # well; a second wrapper would reduce them twice.
        if self._wrapped is not None:
            return module
        with silence_import():
            from fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel as Wrapper

            sharded_optimizer: Any = optimizer
            self._wrapped = wrapped = Wrapper(
                module,
                sharded_optimizer,
                broadcast_buffers=False,  # it would do so before the last micro-batch
                sync_models_at_startup=False,
                reduce_buffer_size=self.bucket_entries,
                warn_on_trainable_params_changed=False,
            )
        return wrapped

    @contextmanager
    def micro_batch(self, *, last: bool, counts: bool = True) -> Iterator[None]:
        """Return the context of a micro-batch; gradients are reduced in the last one."""
        if self._is_first_micro_batch and self._sync_buffers:
            self.prepare_test(*self._modules)
        self._is_first_micro_batch = last
        if last:
            yield
            return
        with self._wrapped.no_sync():
            yield

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the Euclidean norm of the whole gradient, 0-d, bit-identical to one process."""
        # Norms per parameter in the parameters' order, and one norm over them: the order of
        # additions of get_total_norm on a single process. Row 1 marks parameters with a gradient.
        parameters = self._sharded.parameters
        first = parameters[0]
        norms = torch.zeros(2, len(parameters), dtype=first.dtype, device=first.device)
        local = [(n, grad) for n, p in enumerate(parameters) if (grad := p.grad) is not None]
        if local:
            places = [n for n, _ in local]
            norms[0, places] = torch.stack(torch._foreach_norm([grad for _, grad in local]))
            norms[1, places] = 1.0
        dist.all_reduce(norms)
        norm: Tensor = torch.linalg.vector_norm(norms[0][norms[1] > 0])
        return norm

    def any_rank(self, flag: Tensor) -> Tensor:
        """Return 1 if the flag of any rank is 1; each rank sees only its own gradients."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag
