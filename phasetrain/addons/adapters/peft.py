"""Adapters as files of Hugging Face's library PEFT."""

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from safetensors.torch import save
from torch import Tensor, nn

from phasetrain.addons.adapters.lora import TRANSPOSED_LINEAR, LoRA
from phasetrain.errors import ConfigError
from phasetrain.models.adapters.base import list_adapted

PREFIX = "base_model.model."
"""What PEFT puts before the names of the base model."""


def make_peft_files(model: nn.Module, train: Sequence[str], base: str | None) -> dict[str, bytes]:
    """Return name -> content of a folder that `peft.PeftModel.from_pretrained` reads.

    Args:
        model: the model with its adapters.
        train: patterns of the modules that were trained as a whole (MODEL.adapters.train).
        base: where the base model comes from; None if that is not known.

    Raises:
        ConfigError: the model has no adapters, or other adapters than `lora`.
    """
    tensors: dict[str, Tensor] = {}
    adapters: list[LoRA] = []
    transposed = False
    for name, layer in list_adapted(model).items():
        adapter = layer.get_submodule("adapter")
        if not isinstance(adapter, LoRA):
            raise ConfigError(
                f"format 'peft': {name} has an adapter {type(adapter).__name__}; expected lora",
                code="export.unsupported_model",
            )
        adapters.append(adapter)
        transposed |= type(layer).__name__ == TRANSPOSED_LINEAR
        for factor, values in (("A", adapter.a), ("B", adapter.b)):
            key = f"lora_{factor}.weight"
            if isinstance(layer, nn.Embedding):
                key = f"lora_embedding_{factor}"
            tensors[f"{PREFIX}{name}.{key}"] = values.detach().contiguous()
    if not adapters:
        raise ConfigError(
            "format 'peft': the model has no adapters; expected a run with MODEL.adapters",
            code="export.unsupported_model",
        )
    trained = [
        name
        for name, _ in model.named_modules()
        if name and any(fnmatchcase(name, pattern) for pattern in train)
    ]
    for name in trained:
        for key, value in model.get_submodule(name).state_dict().items():
            tensors[f"{PREFIX}{name}.{key}"] = value.detach().contiguous()
    first = adapters[0]
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "bias": "none",
        "fan_in_fan_out": transposed,
        # A regular expression matches whole names; PEFT takes names of a list as endings.
        "target_modules": "|".join(re.escape(name) for name in list_adapted(model)),
        "modules_to_save": trained or None,
        "inference_mode": True,
    }
    return {
        "adapter_config.json": (json.dumps(config, indent=1) + "\n").encode(),
        "adapter_model.safetensors": save(tensors, {"format": "pt"}),
    }
