"""Losses by name (section LOSS)."""

from phasetrain.losses.barlow_twins import BarlowTwins
from phasetrain.losses.base import LOSSES, FunctionLoss, LoggingLoss
from phasetrain.losses.byol import BYOL
from phasetrain.losses.counting import count_of, counts_otherwise
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.losses.dino import DINO
from phasetrain.losses.distillation import SoftTargets
from phasetrain.losses.from_model import FromModel
from phasetrain.losses.moco import MoCo
from phasetrain.losses.simclr import SimCLR
from phasetrain.losses.swav import SwAV
from phasetrain.losses.views import Advancing, Coupled, Holding, Taught
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
