"""Losses by name (section LOSS)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.losses.base import LOSSES, CoupledLoss, FunctionLoss, LoggingLoss, name_loss
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.losses.distillation import SoftTargets
from phasetrain.losses.from_model import FromModel
from phasetrain.losses.mean_reduction import (
    find_ignore_index,
    find_target_counter,
    has_nested_target_counter,
)
from phasetrain.losses.weighted_sum import WeightedSum

__all__ = [
    "LOSSES",
    "CoupledLoss",
    "CrossEntropy",
    "FromModel",
    "FunctionLoss",
    "LoggingLoss",
    "SoftTargets",
    "WeightedSum",
    "find_ignore_index",
    "find_target_counter",
    "has_nested_target_counter",
    "name_loss",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
