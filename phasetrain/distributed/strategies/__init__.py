"""Strategies: how the ranks of a run share an update (`DISTRIBUTED.strategy`)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.distributed.strategies.base import STRATEGIES, AsyncMean, Strategy
    from phasetrain.distributed.strategies.ddp import DataParallel
    from phasetrain.distributed.strategies.ordered import Ordered
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "STRATEGIES",
    "AsyncMean",
    "DataParallel",
    "Ordered",
    "Strategy",
]
