"""Strategies: how the ranks of a run share an update (`DISTRIBUTED.strategy`)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.distributed.strategies.base import STRATEGIES, AsyncMean, Strategy
from phasetrain.distributed.strategies.ddp import DataParallel
from phasetrain.distributed.strategies.ordered import Ordered

__all__ = [
    "STRATEGIES",
    "AsyncMean",
    "DataParallel",
    "Ordered",
    "Strategy",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
