"""Imports of modules from their former places, which work and warn until 0.4."""

import importlib
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

REMOVED_IN = "0.4"

EXPERIMENTS = "phasetrain.addons.experiments"
DEPLOY = "phasetrain.addons.deploy"

MOVED = MappingProxyType(
    {
        "phasetrain.commands": "phasetrain.app",
        **{
            f"phasetrain.commands.{name}": f"{EXPERIMENTS}.{name}"
            for name in (
                *("certify", "find", "fork", "judge", "recipes", "replay", "rerun", "sweep"),
                *("verify", "what_if"),
            )
        },
        **{
            f"phasetrain.commands.{name}": f"{DEPLOY}.{name}"
            for name in ("consolidate", "export", "extract", "pack", "predict", "tokenize")
        },
        "phasetrain.commands.cli": "phasetrain.cli",
        "phasetrain.commands.editor": "phasetrain.addons.authoring.editor",
        "phasetrain.commands.migrate": "phasetrain.addons.vissl",
        "phasetrain.commands.new": "phasetrain.addons.authoring.new",
        "phasetrain.commands.plan": "phasetrain.app.preflight",
        "phasetrain.hooks.profiling": "phasetrain.addons.observe.profiling",
        "phasetrain.hooks.report": "phasetrain.addons.report.hook",
        "phasetrain.hooks.trackers": "phasetrain.addons.observe.trackers",
        "phasetrain.runs.report": "phasetrain.addons.report.page",
        "phasetrain.runs.statistics": f"{EXPERIMENTS}.statistics",
    }
)
"""Former name of a module or package -> its present name; the longest match counts."""

HOOKS = MappingProxyType(
    {
        "Activations": "phasetrain.addons.observe.profiling.activations",
        "Breakdown": "phasetrain.addons.observe.profiling.breakdown",
        "CSV": "phasetrain.addons.observe.trackers.csv",
        "MLflow": "phasetrain.addons.observe.trackers.mlflow",
        "Memory": "phasetrain.addons.observe.profiling.memory",
        "Profiler": "phasetrain.addons.observe.profiling.profiler",
        "Record": "phasetrain.addons.observe.trackers.base",
        "Report": "phasetrain.addons.report.hook",
        "TensorBoard": "phasetrain.addons.observe.trackers.tensorboard",
        "Tracker": "phasetrain.addons.observe.trackers.base",
        "WandB": "phasetrain.addons.observe.trackers.wandb",
    }
)
"""Classes that `phasetrain.hooks` had -> their modules."""


def import_moved_hook(name: str) -> object:
    """Return a class that `phasetrain.hooks` had under a name, with a warning.

    Raises:
        AttributeError: it had none.
    """
    module = HOOKS.get(name)
    if module is None:
        raise AttributeError(f"module 'phasetrain.hooks' has no attribute {name!r}")
    _warn(f"phasetrain.hooks.{name}", f"{module}.{name}")
    return vars(importlib.import_module(module))[name]


class MovedFinder(MetaPathFinder):
    """Finds a module under its former name, after all other finders have failed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how the module is loaded from its present place; None if it has not moved."""
        new_name = find_new_name(name)
        if new_name is None:
            return None
        return ModuleSpec(name, _Loader(new_name), is_package=True)


class _Loader(Loader):
    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module at its present place."""
        _warn(spec.name, self.new_name)
        module = importlib.import_module(self.new_name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system has changed in the module, which is loaded already."""
        module.__spec__ = self.spec


def find_new_name(name: str) -> str | None:
    """Return the present name of a module; None if it has not moved."""
    former = max(
        (old for old in MOVED if name == old or name.startswith(f"{old}.")), key=len, default=None
    )
    if former is None:
        return None
    return MOVED[former] + name.removeprefix(former)


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old}: moved to {new} in 0.2; the old name works until {REMOVED_IN}",
        FutureWarning,
        stacklevel=4,
    )
