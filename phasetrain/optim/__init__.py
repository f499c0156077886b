"""Optimizers, schedules, scalers and the update (section OPTIMIZER)."""

from phasetrain.optim import bridges
from phasetrain.optim.guard import GuardSettings, NonFinite
from phasetrain.optim.large_batch import LAMB, LARS
from phasetrain.optim.optimizers import OPTIMIZERS, fusable
from phasetrain.optim.sam import SamSettings
from phasetrain.optim.scalers import SCALERS
from phasetrain.optim.schedules import SCHEDULES
from phasetrain.optim.several import Several
from phasetrain.optim.updater import Updater

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SCALERS",
    "SCHEDULES",
    "GuardSettings",
    "NonFinite",
    "SamSettings",
    "Several",
    "Updater",
    "bridges",
    "fusable",
]
