"""Trainings that are a function of their config and their seed.

`phasetrain.run` trains and returns the result; `phasetrain.load` returns the task of a run with its
weights.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasetrain.commands.api import RunResult, load, run
    from phasetrain.runs.history import History

__version__ = "0.1.0"

__all__ = ["History", "RunResult", "__version__", "load", "run"]


def __getattr__(name: str) -> Any:
    """Import the Python API at its first use, because importing torch takes a second."""
    if name not in __all__:
        raise AttributeError(f"module 'phasetrain' has no attribute {name!r}")
    from phasetrain.commands.api import RunResult, load, run
    from phasetrain.runs.history import History

    return {"History": History, "RunResult": RunResult, "load": load, "run": run}[name]
