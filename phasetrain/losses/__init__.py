"""Losses by name (section LOSS)."""

from phasetrain.losses.base import LOSSES, FunctionLoss
from phasetrain.losses.cross_entropy import CrossEntropy

__all__ = ["LOSSES", "CrossEntropy", "FunctionLoss"]
