"""Losses by name (section LOSS)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.losses.base import LOSSES, CoupledLoss, FunctionLoss, LoggingLoss, name_loss
    from phasetrain.losses.cross_entropy import CrossEntropy
    from phasetrain.losses.from_model import FromModel
    from phasetrain.losses.mean_reduction import (
        find_ignore_index,
        find_target_counter,
        has_nested_target_counter,
    )
    from phasetrain.losses.weighted_sum import WeightedSum
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "LOSSES",
    "CoupledLoss",
    "CrossEntropy",
    "FromModel",
    "FunctionLoss",
    "LoggingLoss",
    "WeightedSum",
    "find_ignore_index",
    "find_target_counter",
    "has_nested_target_counter",
    "name_loss",
]
