"""PyTorch training that survives being killed: a run is a function of its config and its seed.

`phasetrain.fit` trains a model object on dataset objects, and `phasetrain.run` runs a config; both
return the result. `phasetrain.load` returns the task of a run with its weights. `phasetrain.pack`
writes its model to one file, which `phasetrain.load_pack` loads. `phasetrain.log` logs a number
from within a step; `log_figure`, `log_image`, `log_text` and `log_audio` log media for the report
and trackers.
"""

import sys
from typing import TYPE_CHECKING, Any

from phasetrain.config.moved import MovedFinder

if TYPE_CHECKING:
    from phasetrain.addons.audit.auditor import audit
    from phasetrain.addons.deploy.pack.load_pack import PackedModel, load_pack
    from phasetrain.addons.deploy.pack.pack import pack
    from phasetrain.addons.observe.media import log_audio, log_figure, log_image, log_text
    from phasetrain.app.api import RunResult, load, run, train
    from phasetrain.app.fit import fit
    from phasetrain.engine.step_logs import log
    from phasetrain.runs.history import History

    # While the program runs, `__getattr__` lists those that are installed.
    __all__ = [
        "History",
        "PackedModel",
        "RunResult",
        "__version__",
        "audit",
        "fit",
        "load",
        "load_pack",
        "log",
        "log_audio",
        "log_figure",
        "log_image",
        "log_text",
        "pack",
        "run",
        "train",
    ]

__version__ = "0.1.0"

# Before the finders of Python, which would load a module a second time below the former name of its
# package.
sys.meta_path.insert(0, MovedFinder())

_PLACES = {
    "History": "phasetrain.runs.history",
    "RunResult": "phasetrain.app.result",
    "fit": "phasetrain.app.fit",
    "load": "phasetrain.app.load",
    # Called from models, which should not import the rest.
    "log": "phasetrain.engine.step_logs",
    "run": "phasetrain.app.api",
    "train": "phasetrain.app.api",
}
"""Name of the Python API -> its module."""


def __getattr__(name: str) -> Any:
    """Import the Python API on first use, because importing torch takes a second."""
    from phasetrain.config.addons import find_name, import_object, load_addons

    if name == "__all__":
        added = (added for addon in load_addons() for added in addon.names)
        return sorted(["__version__", *_PLACES, *added])
    path = f"{_PLACES[name]}:{name}" if name in _PLACES else find_name(name)
    if path is None:
        return _find_renamed(name)
    value = import_object(path)
    # A model calls phasetrain.log in each forward pass: this function runs once per name.
    globals()[name] = value
    return value


def _find_renamed(name: str) -> Any:
    """Return a public name under its old name, with a warning.

    Raises:
        AttributeError: there is no such name.
    """
    import warnings

    from phasetrain.config.addons import explain_missing
    from phasetrain.config.deprecations import find_python_name

    entry = find_python_name(name)
    if entry is None:
        raise AttributeError(f"module 'phasetrain' has no attribute {name!r}{explain_missing()}")
    warnings.warn(entry.warning, FutureWarning, stacklevel=3)
    return __getattr__(entry.new.removeprefix("phasetrain."))
