"""Trainings that are a function of their config and their seed.

`phasetrain.run` runs what a config describes and returns the result, `phasetrain.train` trains, and
`phasetrain.load` returns the task of a run with its weights.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasetrain.commands.api import RunResult, load, run, train
    from phasetrain.runs.history import History

__version__ = "0.1.0"

__all__ = ["History", "RunResult", "__version__", "load", "run", "train"]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use, because importing torch takes a second."""
    if name not in __all__:
        raise AttributeError(f"module 'phasetrain' has no attribute {name!r}")
    from phasetrain.commands import api
    from phasetrain.runs.history import History

    return {**vars(api), "History": History}[name]
