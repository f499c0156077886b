"""Losses by name (section LOSS)."""

from phasetrain.losses.base import LOSSES, FunctionLoss, LoggingLoss, name_loss
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.losses.dice import DiceLoss
from phasetrain.losses.distillation import SoftTargets
from phasetrain.losses.from_model import FromModel
from phasetrain.losses.mean_reduction import find_target_counter, has_nested_target_counter
from phasetrain.losses.self_supervised.barlow_twins import BarlowTwins
from phasetrain.losses.self_supervised.byol import BYOL
from phasetrain.losses.self_supervised.deepcluster import DeepClusterV2
from phasetrain.losses.self_supervised.dino import DINO
from phasetrain.losses.self_supervised.moco import MoCo
from phasetrain.losses.self_supervised.multi_view import (
    ClusteringLoss,
    CoupledLoss,
    FreezingLoss,
    InstanceLoss,
    MemoryLoss,
    ScheduledLoss,
    TeacherLoss,
)
from phasetrain.losses.self_supervised.npid import NPID
from phasetrain.losses.self_supervised.simclr import SimCLR
from phasetrain.losses.self_supervised.swav import SwAV
from phasetrain.losses.self_supervised.view_distillation import ViewDistillation
from phasetrain.losses.weighted_sum import WeightedSum

__all__ = [
    "BYOL",
    "DINO",
    "LOSSES",
    "NPID",
    "BarlowTwins",
    "ClusteringLoss",
    "CoupledLoss",
    "CrossEntropy",
    "DeepClusterV2",
    "DiceLoss",
    "FreezingLoss",
    "FromModel",
    "FunctionLoss",
    "InstanceLoss",
    "LoggingLoss",
    "MemoryLoss",
    "MoCo",
    "ScheduledLoss",
    "SimCLR",
    "SoftTargets",
    "SwAV",
    "TeacherLoss",
    "ViewDistillation",
    "WeightedSum",
    "find_target_counter",
    "has_nested_target_counter",
    "name_loss",
]
