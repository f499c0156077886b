"""Models of other libraries by name; a library is imported only if a config names one of its
models."""

from phasetrain.addons.libraries.models.timm import find_timm_model
from phasetrain.addons.libraries.models.torchvision import find_torchvision_model
from phasetrain.addons.libraries.models.transformers import find_transformers_model

__all__ = ["find_timm_model", "find_torchvision_model", "find_transformers_model"]
