"""Hooks: what watches a run (section HOOKS)."""

from phasetrain.hooks.activations import Activations
from phasetrain.hooks.base import HOOKS, Hook, Hooks, Run, on
from phasetrain.hooks.breakdown import Breakdown
from phasetrain.hooks.checkpoint import CheckpointHook, SaveSettings
from phasetrain.hooks.console import ConsoleView
from phasetrain.hooks.csv import CSV
from phasetrain.hooks.early_stopping import EarlyStopping
from phasetrain.hooks.ledger import LedgerHook
from phasetrain.hooks.memory import Memory
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.mlflow import MLflow
from phasetrain.hooks.numerics import Numerics
from phasetrain.hooks.plateau import Plateau
from phasetrain.hooks.profiler import Profiler
from phasetrain.hooks.report import Report
from phasetrain.hooks.stragglers import Stragglers
from phasetrain.hooks.tensorboard import TensorBoard
from phasetrain.hooks.tracker import Record, Tracker
from phasetrain.hooks.wandb import WandB
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
    "Record",
    "ReloadWeights",
    "Report",
    "Run",
    "SaveSettings",
    "Stragglers",
    "TensorBoard",
    "Tracker",
    "WandB",
    "Watchdog",
    "on",
]
