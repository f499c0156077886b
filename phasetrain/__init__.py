"""Trainings that are a function of their config and their seed.

`phasetrain.run` trains and returns what came of it, `phasetrain.load` returns the task of a run with its weights.
"""

from phasetrain.late import __getattr__ as __getattr__

__version__ = "0.1.0"

__all__ = ["History", "RunResult", "__version__", "load", "run"]
