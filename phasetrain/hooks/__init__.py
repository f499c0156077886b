"""Hooks: what watches a run (section HOOKS)."""

from phasetrain.hooks.base import HOOKS, Hook, Hooks, Run, on
from phasetrain.hooks.checkpoint import CheckpointHook, SaveSettings
from phasetrain.hooks.console import ConsoleView
from phasetrain.hooks.early_stopping import EarlyStopping
from phasetrain.hooks.ledger import LedgerHook
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.numerics import Numerics
from phasetrain.hooks.plateau import Plateau
from phasetrain.hooks.stragglers import Stragglers
from phasetrain.hooks.tensorboard import TensorBoard
from phasetrain.hooks.watchdog import Watchdog
from phasetrain.hooks.weights import ReloadWeights

__all__ = [
    "HOOKS",
    "CheckpointHook",
    "ConsoleView",
    "EarlyStopping",
    "Hook",
    "Hooks",
    "LedgerHook",
    "Metrics",
    "Numerics",
    "Plateau",
    "ReloadWeights",
    "Run",
    "SaveSettings",
    "Stragglers",
    "TensorBoard",
    "Watchdog",
    "on",
]
