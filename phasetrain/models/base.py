"""The registry of models (section MODEL)."""

from torch import nn

from phasetrain.config.registry import Registry

MODELS: Registry[nn.Module] = Registry("model", "MODEL")
