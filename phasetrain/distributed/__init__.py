"""The processes of a run and how they share its work (section DISTRIBUTED)."""

from phasetrain.distributed.buffers import Kept, buffers_of, fill_buffers, places
from phasetrain.distributed.collectives import (
    gather_rows,
    gather_with_gradient,
    log_once,
    main_first,
    reduce,
)
from phasetrain.distributed.consensus import Consensus
from phasetrain.distributed.failures import Failures, is_lost_peer
from phasetrain.distributed.group import joined
from phasetrain.distributed.order import guarded
from phasetrain.distributed.placement import Placement, placed
from phasetrain.distributed.strategies import STRATEGIES, Mean, Ordered, Strategy
from phasetrain.distributed.world import World

__all__ = [
    "STRATEGIES",
    "Consensus",
    "Failures",
    "Kept",
    "Mean",
    "Ordered",
    "Placement",
    "Strategy",
    "World",
    "buffers_of",
    "fill_buffers",
    "gather_rows",
    "gather_with_gradient",
    "guarded",
    "is_lost_peer",
    "joined",
    "log_once",
    "main_first",
    "placed",
    "places",
    "reduce",
]
