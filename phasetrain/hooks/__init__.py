"""Hooks: what watches a run (section HOOKS)."""

from phasetrain.hooks.base import HOOKS, Hook, Hooks, Run, on
from phasetrain.hooks.checkpoint import CheckpointHook, SaveSettings
from phasetrain.hooks.console import ConsoleView
from phasetrain.hooks.ledger import LedgerHook
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.numerics import Numerics
from phasetrain.hooks.tensorboard import TensorBoard
from phasetrain.hooks.watchdog import Watchdog

__all__ = [
    "HOOKS",
    "CheckpointHook",
    "ConsoleView",
    "Hook",
    "Hooks",
    "LedgerHook",
    "Metrics",
    "Numerics",
    "Run",
    "SaveSettings",
    "TensorBoard",
    "Watchdog",
    "on",
]
