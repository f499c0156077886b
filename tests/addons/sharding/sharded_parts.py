"""Strategies that shard without one necessary step each."""

from torch import Tensor

from phasetrain.addons.sharding.sharded_ddp import ShardedDataParallel
from phasetrain.distributed import STRATEGIES


@STRATEGIES.register("bucketed")
class Bucketed(ShardedDataParallel):
    """`sharded_ddp` with fairscale's default buckets."""

    bucket_entries = 2**23


@STRATEGIES.register("deaf")
class Deaf(ShardedDataParallel):
    """`sharded_ddp` in which each rank checks only its own gradients for NaN."""

    def any_rank(self, flag: Tensor) -> Tensor:
        return flag
