"""Optimizers, schedules, scalers and the update (section OPTIMIZER)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.optim.multi_optimizer import MultiOptimizer
from phasetrain.optim.optimizers import OPTIMIZERS, fusable
from phasetrain.optim.schedules.param_schedules import Schedules
from phasetrain.optim.schedules.schedules import SCHEDULES
from phasetrain.optim.update.gradients import GradientSettings
from phasetrain.optim.update.nonfinite import CLEAN_DATA, GuardSettings, NonFinite
from phasetrain.optim.update.sam import SamSettings
from phasetrain.optim.update.scalers import SCALERS
from phasetrain.optim.update.updater import Updater

__all__ = [
    "CLEAN_DATA",
    "OPTIMIZERS",
    "SCALERS",
    "SCHEDULES",
    "GradientSettings",
    "GuardSettings",
    "MultiOptimizer",
    "NonFinite",
    "SamSettings",
    "Schedules",
    "Updater",
    "fusable",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
