"""How the processes of a run share its updates, by name (`DISTRIBUTED.strategy`)."""

from phasetrain.distributed.strategies.base import STRATEGIES, Mean, Strategy
from phasetrain.distributed.strategies.ddp import DataParallel
from phasetrain.distributed.strategies.ordered import Ordered

__all__ = ["STRATEGIES", "DataParallel", "Mean", "Ordered", "Strategy"]
