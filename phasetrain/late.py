"""The names of `phasetrain` itself, imported when they are used first: they need torch, which takes a second."""

from importlib import import_module
from typing import Any

PLACES = {"History": "phasetrain.history", "RunResult": "phasetrain.api", "load": "phasetrain.api"}
"""Where each name stands."""


def __getattr__(name: str) -> Any:
    """Return a name of the package; for `run` the module, which can be called.

    Raises:
        AttributeError: the package has no such name.
    """
    if name == "run":
        return import_module("phasetrain.run")
    if name not in PLACES:
        raise AttributeError(f"module 'phasetrain' has no attribute {name!r}")
    return vars(import_module(PLACES[name]))[name]
