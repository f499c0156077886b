"""Models of other libraries by name; a library is imported only if a config names one of its
models."""

from phasetrain.models.bridges.timm import find_timm_model
from phasetrain.models.bridges.torchvision import find_torchvision_model
from phasetrain.models.bridges.transformers import find_transformers_model

__all__ = ["find_timm_model", "find_torchvision_model", "find_transformers_model"]
