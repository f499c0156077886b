"""How the processes of a run share its updates, by name (`DISTRIBUTED.strategy`)."""

from phasetrain.distributed.strategies.base import STRATEGIES, Mean, Strategy
from phasetrain.distributed.strategies.ddp import DataParallel
from phasetrain.distributed.strategies.fsdp import FullyShard
from phasetrain.distributed.strategies.ordered import Ordered
from phasetrain.distributed.strategies.sharded_ddp import ShardedDataParallel
from phasetrain.distributed.strategies.zero import Zero

__all__ = [
    "STRATEGIES",
    "DataParallel",
    "FullyShard",
    "Mean",
    "Ordered",
    "ShardedDataParallel",
    "Strategy",
    "Zero",
]
