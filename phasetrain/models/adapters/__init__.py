"""Adapters: small trainable additions to the layers of a frozen model (MODEL.adapters)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.models.adapters.base import (
    ADAPTERS,
    Adapter,
    attach_adapters,
    list_adapted,
    list_base_parameters,
)

__all__ = [
    "ADAPTERS",
    "Adapter",
    "attach_adapters",
    "list_adapted",
    "list_base_parameters",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
