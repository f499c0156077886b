"""Gradients averaged as by `ddp`, the optimizer's state spread over processes (torch's
ZeroRedundancyOptimizer)."""

from typing import Any

from torch.optim import Optimizer

from phasetrain.distributed.strategies.base import STRATEGIES, Groups, MakeOptimizer
from phasetrain.distributed.strategies.ddp import DataParallel
from phasetrain.distributed.strategies.sharded_state import ShardedState, quiet, refuse_types
from phasetrain.distributed.world import World


@STRATEGIES.register("zero")
class Zero(ShardedState, DataParallel):
    """Each process updates some of the parameters and tells the others (Rajbhandari et al. 2020,
    arXiv:1910.02054).

    Weights are those of `ddp`, bit for bit; the optimizer takes as much memory less as there are
    processes.

    Args:
        world: fact; the processes.
        bucket_cap_mb, sync_buffers, find_unused_parameters, static_graph, gradient_as_bucket_view:
            as for `ddp`.
        parameters_as_bucket_view: parameters lie one after the other in one buffer per process,
            which makes one message of those of each.
        communication: fact; as for `ddp`.
    """

    def __init__(
        self,
        world: World,
        *,
        bucket_cap_mb: float = 25.0,
        sync_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        parameters_as_bucket_view: bool = False,
        communication: str = "none",
    ) -> None:
        super().__init__(
            world,
            bucket_cap_mb=bucket_cap_mb,
            sync_buffers=sync_buffers,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            communication=communication,
        )
        self._as_view = parameters_as_bucket_view

    def optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return an optimizer whose state is spread over the processes.

        Raises:
            ValueError: the parameters are of several types.
        """
        refuse_types("zero", groups)
        with quiet():  # importing it compiles with torch.jit, which torch itself warns of
            from torch.distributed.optim import ZeroRedundancyOptimizer
        kind: Any = make
        outer = ZeroRedundancyOptimizer(
            groups, optimizer_class=kind, parameters_as_bucket_view=self._as_view
        )
        return self._divided(outer, outer.optim)
