"""Losses by name (section LOSS)."""

from phasetrain.losses.base import LOSSES, FunctionLoss, LoggingLoss, name_loss
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.addons.vision.dice import DiceLoss
from phasetrain.losses.distillation import SoftTargets
from phasetrain.losses.from_model import FromModel
from phasetrain.losses.mean_reduction import find_target_counter, has_nested_target_counter
from phasetrain.addons.vision.self_supervised_losses.barlow_twins import BarlowTwins
from phasetrain.addons.vision.self_supervised_losses.byol import BYOL
from phasetrain.addons.vision.self_supervised_losses.deepcluster import DeepClusterV2
from phasetrain.addons.vision.self_supervised_losses.dino import DINO
from phasetrain.addons.vision.self_supervised_losses.moco import MoCo
from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    ClusteringLoss,
    CoupledLoss,
    FreezingLoss,
    InstanceLoss,
    MemoryLoss,
    ScheduledLoss,
    TeacherLoss,
)
from phasetrain.addons.vision.self_supervised_losses.npid import NPID
from phasetrain.addons.vision.self_supervised_losses.simclr import SimCLR
from phasetrain.addons.vision.self_supervised_losses.swav import SwAV
from phasetrain.addons.vision.self_supervised_losses.view_distillation import ViewDistillation
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
