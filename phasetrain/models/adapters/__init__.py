"""Adapters: small trainable additions to the layers of a frozen model (MODEL.adapters)."""

from phasetrain.models.adapters.base import (
    ADAPTERS,
    Adapter,
    attach_adapters,
    list_adapted,
    list_base_parameters,
)
from phasetrain.models.adapters.lora import LoRA
from phasetrain.models.adapters.merge import merge_adapters, remove_adapters
from phasetrain.models.adapters.peft import make_peft_files

__all__ = [
    "ADAPTERS",
    "Adapter",
    "LoRA",
    "attach_adapters",
    "list_adapted",
    "list_base_parameters",
    "make_peft_files",
    "merge_adapters",
    "remove_adapters",
]
