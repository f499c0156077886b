"""Losses by name (section LOSS)."""

from phasetrain.losses.base import LOSSES, FunctionLoss, LoggingLoss
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.losses.distillation import SoftTargets
from phasetrain.losses.from_model import FromModel
from phasetrain.losses.mean_reduction import count_of, counts_otherwise
from phasetrain.losses.self_supervised.barlow_twins import BarlowTwins
from phasetrain.losses.self_supervised.byol import BYOL
from phasetrain.losses.self_supervised.dino import DINO
from phasetrain.losses.self_supervised.moco import MoCo
from phasetrain.losses.self_supervised.multi_view import Advancing, Coupled, Holding, Taught
from phasetrain.losses.self_supervised.simclr import SimCLR
from phasetrain.losses.self_supervised.swav import SwAV
from phasetrain.losses.weighted_sum import WeightedSum

__all__ = [
    "BYOL",
    "DINO",
    "LOSSES",
    "Advancing",
    "BarlowTwins",
    "Coupled",
    "CrossEntropy",
    "FromModel",
    "FunctionLoss",
    "Holding",
    "LoggingLoss",
    "MoCo",
    "SimCLR",
    "SoftTargets",
    "SwAV",
    "Taught",
    "WeightedSum",
    "count_of",
    "counts_otherwise",
]
