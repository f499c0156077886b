"""Which code a config from elsewhere may run: the parts of phasetrain and of known libraries.

A dotted path in a config names any callable of any module, such as `subprocess.getoutput`. Whoever
writes a command is trusted with that; the author of a run folder is not.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from phasetrain.errors import ConfigError

LIBRARIES = ("phasetrain", "torch", "torchvision", "torchmetrics", "timm", "transformers")
"""Packages whose classes need no trust, if they are of the expected kind."""

BRIDGED = ("albumentations",)
"""Packages of which names such as `albumentations.HorizontalFlip` need no trust, because a registry
takes classes of one kind by them and nothing else."""

BASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("torch.nn.modules.module.Module",),
        "head": ("torch.nn.modules.module.Module",),
        "loss": ("torch.nn.modules.module.Module",),
        "meter": ("phasetrain.meters.base.Meter", "torchmetrics.metric.Metric"),
        "optimizer": ("torch.optim.optimizer.Optimizer",),
        "schedule": ("torch.optim.lr_scheduler.LRScheduler",),
        "sampler": ("torch.utils.data.sampler.Sampler",),
        "dataset": ("torch.utils.data.dataset.Dataset",),
        "transform": ("phasetrain.data.transforms.base.BatchTransform",),
        "hook": ("phasetrain.hooks.base.Hook",),
        "task": ("phasetrain.tasks.base.Task",),
    }
)
"""Kind of part -> base classes, one of which a class of a library must have. Other kinds are often
functions, which cannot be told from functions that do anything else."""

DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")

_trusted: ContextVar[frozenset[str] | None] = ContextVar("trusted dotted paths", default=None)


@contextmanager
def trust_only(paths: frozenset[str] | None) -> Iterator[None]:
    """Let registries import these dotted paths and classes of `LIBRARIES`, and nothing else; None
    lets them import anything."""
    token = _trusted.set(paths)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted(path: str) -> bool:
    """Return whether a dotted path may be imported whatever it is."""
    trusted = _trusted.get()
    return trusted is None or path in trusted


def is_library_path(path: str) -> bool:
    """Return whether a dotted path is in a public module of one of `LIBRARIES`, or a name of one of
    `BRIDGED`.

    Modules named `distributed` count as private, because their objects connect to other machines.
    """
    package, *rest = path.split(".")
    is_known = package in LIBRARIES or (package in BRIDGED and len(rest) == 1)
    return is_known and not any(name == "distributed" or name.startswith("_") for name in rest)


def is_library_part(thing: Any, kind: str) -> bool:
    """Return whether something is a class of one of `LIBRARIES` with the base class of a kind."""
    # Bases are compared by name: importing torchmetrics only to compare takes seconds.
    if not isinstance(thing, type) or thing.__module__.partition(".")[0] not in LIBRARIES:
        return False
    names = {f"{base.__module__}.{base.__qualname__}" for base in thing.__mro__}
    return not names.isdisjoint(BASES.get(kind, ()))


def make_trust_error(path: str, key: str) -> ConfigError:
    """Return the error about a dotted path that is not trusted."""
    return ConfigError(
        f"{key} = {path!r}: the config comes from a run folder, and this is code from outside of "
        "phasetrain; if you trust the folder, repeat the command with --trust, or trust=True in "
        "Python",
        code="trust.needed",
    )
