"""Models of other libraries by name; each library is imported when a config names one of its
models."""

from phasetrain.models.bridges.timm import timm_model
from phasetrain.models.bridges.torchvision import torchvision_model
from phasetrain.models.bridges.transformers import transformers_model

__all__ = ["timm_model", "torchvision_model", "transformers_model"]
