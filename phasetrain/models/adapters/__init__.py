"""Adapters: small trainable additions to the layers of a frozen model (MODEL.adapters)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.models.adapters.base import (
    ADAPTERS,
    Adapter,
    attach_adapters,
    list_adapted,
    list_base_parameters,
)
from phasetrain.models.adapters.lora import LoRA
from phasetrain.models.adapters.merge import merge_adapters, remove_adapters

__all__ = [
    "ADAPTERS",
    "Adapter",
    "LoRA",
    "attach_adapters",
    "list_adapted",
    "list_base_parameters",
    "merge_adapters",
    "remove_adapters",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
