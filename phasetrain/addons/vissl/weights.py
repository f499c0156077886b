"""Weights of VISSL as a file that `MODEL.weights` reads (`migrate vissl-weights`)."""

import codecs
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.errors import ConfigError, is_out_of_memory

MODULES = ("vissl.config.attr_dict", "vissl.config", "vissl.utils.hydra_config")
"""Modules of VISSL that have had the class AttrDict, a dictionary."""

COMMAND = "migrate vissl-weights"


def convert_weights(path: str | Path, out: str | Path) -> int:
    """Write the tensors and arrays of a file of VISSL as tensors, and return their number.

    No code of the file is executed: it may contain NumPy arrays and VISSL's dictionaries, next to
    types that torch considers data.

    Args:
        path: a file written by `torch.save`.
        out: file to write, which must not exist.

    Raises:
        ConfigError: the file cannot be read or has no tensor, or `out` exists.
    """
    if Path(out).exists():
        raise ConfigError(
            f"{COMMAND} --out {out}: the file exists; expected a new one", code="file.exists"
        )
    state = _keep_tensors(_load(path))
    count = _count_tensors(state)
    if not count:
        raise ConfigError(
            f"{COMMAND} {path}: the file has no tensor; expected a checkpoint or weights of VISSL",
            code="weights.no_fit",
        )
    torch.save(state, out)
    return count


def _load(path: str | Path) -> Any:
    allowed: list[Any] = [(OrderedDict, f"{module}.AttrDict") for module in MODULES]
    # What an array and a number of NumPy are made by; the module depends on NumPy's version.
    makers: list[Any] = [np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0]]
    allowed += [
        (maker, f"{module}.{maker.__name__}")
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for maker in makers
    ]
    allowed += [np.ndarray, np.dtype, codecs.encode]
    # Each type of elements is a class of its own.
    allowed += [type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *"efd?")]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        # Torch's own words advise to execute the code of the file.
        match = re.search(r"GLOBAL (\S+)", str(error))
        found = f"it contains {match[1]}" if match else type(error).__name__
        raise ConfigError(
            f"{COMMAND} {path}: cannot be read: {found}; expected a file of torch.save with "
            "tensors, NumPy arrays, numbers, text and mappings",
            code="file.unreadable",
        ) from error


def _keep_tensors(value: Any) -> Any:
    """Return the mappings and tensors of a value, with arrays as tensors; None: it has neither."""
    if isinstance(value, Mapping):
        kept = {str(key): _keep_tensors(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner is not None} or None
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    return value if isinstance(value, Tensor) else None


def _count_tensors(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_tensors, value.values()))
    return int(isinstance(value, Tensor))
