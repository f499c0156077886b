"""Ranks of a run, their collectives and strategies (section DISTRIBUTED)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.distributed.buffers import (
        BufferSnapshot,
        buffer_lookup,
        find_buffers,
        load_buffers,
    )
    from phasetrain.distributed.collectives import (
        gather_rows,
        gather_with_gradient,
        log_once,
        rank_zero_first,
        reduce,
    )
    from phasetrain.distributed.consensus import Consensus
    from phasetrain.distributed.failures import Failures, is_lost_peer
    from phasetrain.distributed.group import join_process_group
    from phasetrain.distributed.placement import Placement, find_placement
    from phasetrain.distributed.strategies.base import STRATEGIES, AsyncMean, Strategy
    from phasetrain.distributed.strategies.ordered import Ordered
    from phasetrain.distributed.world import World
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "STRATEGIES",
    "AsyncMean",
    "BufferSnapshot",
    "Consensus",
    "Failures",
    "Ordered",
    "Placement",
    "Strategy",
    "World",
    "buffer_lookup",
    "find_buffers",
    "find_placement",
    "gather_rows",
    "gather_with_gradient",
    "is_lost_peer",
    "join_process_group",
    "load_buffers",
    "log_once",
    "rank_zero_first",
    "reduce",
]
