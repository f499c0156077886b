"""The processes of a run and how they share its work (section DISTRIBUTED)."""

from phasetrain.distributed.consensus import Consensus
from phasetrain.distributed.failures import Failures, is_lost_peer
from phasetrain.distributed.group import joined
from phasetrain.distributed.placement import Placement, placed
from phasetrain.distributed.strategies import STRATEGIES, Mean, Ordered, Strategy
from phasetrain.distributed.world import World

__all__ = [
    "STRATEGIES",
    "Consensus",
    "Failures",
    "Mean",
    "Ordered",
    "Placement",
    "Strategy",
    "World",
    "is_lost_peer",
    "joined",
    "placed",
]
