"""Optimizers, schedules, scalers and the update (section OPTIMIZER)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.optim.multi_optimizer import MultiOptimizer
    from phasetrain.optim.optimizers import OPTIMIZERS, fusable
    from phasetrain.optim.schedules.param_schedules import Schedules
    from phasetrain.optim.schedules.schedules import SCHEDULES
    from phasetrain.optim.update.gradients import GradientSettings
    from phasetrain.optim.update.nonfinite import CLEAN_DATA, GuardSettings, NonFinite
    from phasetrain.optim.update.scalers import SCALERS
    from phasetrain.optim.update.updater import Updater
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "CLEAN_DATA",
    "OPTIMIZERS",
    "SCALERS",
    "SCHEDULES",
    "GradientSettings",
    "GuardSettings",
    "MultiOptimizer",
    "NonFinite",
    "Schedules",
    "Updater",
    "fusable",
]
