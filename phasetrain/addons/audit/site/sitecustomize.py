"""Loads the probe of `phasetrain audit` at the start of each Python process of the audited command.

This folder is the first one of PYTHONPATH there.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - for a fast start


def _load_hidden() -> None:
    """Run the `sitecustomize` of the environment, which this file hides."""
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _FOLDER])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _load_probe() -> None:
    path = os.path.join(os.path.dirname(_FOLDER), "probe.py")  # noqa: PTH118, PTH120
    spec = spec_from_file_location("_phasetrain_audit_probe", path)
    assert spec is not None
    assert spec.loader is not None
    probe = module_from_spec(spec)
    sys.modules[spec.name] = probe
    spec.loader.exec_module(probe)
    probe.start()


_load_hidden()
_load_probe()
