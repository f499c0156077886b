"""Hooks, which watch a run (section HOOKS)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.hooks.base import HOOKS, Hook, Run, on
    from phasetrain.hooks.checkpoint import CheckpointHook
    from phasetrain.hooks.dispatch import Hooks
    from phasetrain.hooks.ledger import LedgerHook
    from phasetrain.hooks.metrics import Metrics
    from phasetrain.hooks.monitors.early_stopping import EarlyStopping
    from phasetrain.hooks.numerics import Numerics
    from phasetrain.hooks.progress.console import ConsoleView
else:
    __getattr__, __dir__ = export_lazily(__name__)

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
    "Run",
    "on",
]
