"""PyTorch training that survives being killed: a run is a function of its config and its seed.

`phasetrain.fit` trains a model of Python on datasets of Python, `phasetrain.run` runs what a config
describes, both return the result; `phasetrain.load` returns the task of a run with its weights,
`phasetrain.pack` writes its model to one file, which `phasetrain.load_pack` loads, and
`phasetrain.log` logs a number from within a step.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasetrain.commands.api import RunResult, load, run, train
    from phasetrain.commands.fit import fit
    from phasetrain.commands.pack.load_pack import PackedModel, load_pack
    from phasetrain.commands.pack.pack import pack
    from phasetrain.engine.step_logs import log
    from phasetrain.runs.history import History

__version__ = "0.1.0"

__all__ = [
    "History",
    "PackedModel",
    "RunResult",
    "__version__",
    "fit",
    "load",
    "load_pack",
    "log",
    "pack",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use, because importing torch takes a second."""
    if name not in __all__:
        return _find_renamed(name)
    found: Any
    if name == "log":
        # Called from models, which should not import the commands.
        from phasetrain.engine import step_logs

        found = step_logs.log
    elif name in ("PackedModel", "load_pack", "pack"):
        from phasetrain.commands.pack import load_pack, pack

        found = {**vars(load_pack), **vars(pack)}[name]
    else:
        from phasetrain.commands import api
        from phasetrain.commands.fit import fit
        from phasetrain.runs.history import History

        found = {**vars(api), "fit": fit, "History": History}[name]
    # A model calls phasetrain.log in each forward pass: this function runs once per name.
    globals()[name] = found
    return found


def _find_renamed(name: str) -> Any:
    """Return a public name under its old name, with a warning.

    Raises:
        AttributeError: there is no such name.
    """
    import warnings

    from phasetrain.config.deprecations import find_python_name

    entry = find_python_name(name)
    if entry is None:
        raise AttributeError(f"module 'phasetrain' has no attribute {name!r}")
    warnings.warn(entry.warning, FutureWarning, stacklevel=3)
    return __getattr__(entry.new.removeprefix("phasetrain."))
