"""Hooks, which watch a run (section HOOKS)."""

from phasetrain.hooks.base import HOOKS, Hook, Hooks, Run, on
from phasetrain.hooks.checkpoint import CheckpointHook
from phasetrain.hooks.ledger import LedgerHook
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.monitors.early_stopping import EarlyStopping
from phasetrain.hooks.monitors.plateau import Plateau
from phasetrain.hooks.numerics import Numerics
from phasetrain.hooks.profiling.activations import Activations
from phasetrain.hooks.profiling.breakdown import Breakdown
from phasetrain.hooks.profiling.memory import Memory
from phasetrain.hooks.profiling.profiler import Profiler
from phasetrain.hooks.profiling.stragglers import Stragglers
from phasetrain.hooks.progress.console import ConsoleView
from phasetrain.hooks.recheck.recheck import Recheck
from phasetrain.hooks.report import Report
from phasetrain.hooks.trackers.base import Record, Tracker
from phasetrain.hooks.trackers.csv import CSV
from phasetrain.hooks.trackers.mlflow import MLflow
from phasetrain.hooks.trackers.tensorboard import TensorBoard
from phasetrain.hooks.trackers.wandb import WandB
from phasetrain.hooks.watchdog import Watchdog
from phasetrain.hooks.weights import ReloadWeights

__all__ = [
    "CSV",
    "HOOKS",
    "Activations",
    "Breakdown",
    "CheckpointHook",
    "ConsoleView",
    "EarlyStopping",
    "Hook",
    "Hooks",
    "LedgerHook",
    "MLflow",
    "Memory",
    "Metrics",
    "Numerics",
    "Plateau",
    "Profiler",
    "Recheck",
    "Record",
    "ReloadWeights",
    "Report",
    "Run",
    "Stragglers",
    "TensorBoard",
    "Tracker",
    "WandB",
    "Watchdog",
    "on",
]
