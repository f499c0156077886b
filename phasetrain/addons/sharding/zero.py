"""DDP with the optimizer's state sharded over ranks (torch's ZeroRedundancyOptimizer)."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch.optim import Optimizer

from phasetrain.addons.sharding.sharded_state import (
    ShardedOptimizerState,
    reject_mixed_dtypes,
    silence_import,
)
from phasetrain.distributed.strategies import STRATEGIES, DataParallel
from phasetrain.distributed.strategies.base import Groups, MakeOptimizer


@STRATEGIES.register("zero")
@dataclass(eq=False, repr=False)
class Zero(DataParallel):
    """Each rank updates some of the parameters and broadcasts them (Rajbhandari et al. 2020,
    arXiv:1910.02054).

    The weights are bit-identical to `ddp`; each rank holds 1/world size of the optimizer's state.

    Args:
        world: fact; the ranks.
        bucket_cap_mb, sync_buffers, find_unused_parameters, static_graph, gradient_as_bucket_view:
            as for `ddp`.
        communication: fact; as for `ddp`.
        parameters_as_bucket_view: parameters of a rank are contiguous in one buffer, so that each
            rank broadcasts once.
    """

    shards_optimizer = True

    _: KW_ONLY
    parameters_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state = self._sharded = ShardedOptimizerState(self.world)

    def make_optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return an optimizer whose state is sharded over ranks.

        Raises:
            ValueError: the parameters have several dtypes.
        """
        reject_mixed_dtypes("zero", groups)
        with silence_import():  # importing it compiles with torch.jit, which warns
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer_class: Any = make
        optimizer = ZeroRedundancyOptimizer(
            groups,
            optimizer_class=optimizer_class,
            parameters_as_bucket_view=self.parameters_as_bucket_view,
        )
        return self._sharded.attach(optimizer, optimizer.optim)
