"""Hooks: what watches a run (section HOOKS)."""

from phasetrain.hooks.base import HOOKS, Hook, Hooks, Run, on
from phasetrain.hooks.checkpoint import CheckpointHook, SaveSettings
from phasetrain.hooks.console import ConsoleView
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.tensorboard import TensorBoard

__all__ = [
    "HOOKS",
    "CheckpointHook",
    "ConsoleView",
    "Hook",
    "Hooks",
    "Metrics",
    "Run",
    "SaveSettings",
    "TensorBoard",
    "on",
]
