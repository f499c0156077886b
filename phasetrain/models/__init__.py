"""Models by name (section MODEL)."""

from phasetrain.models.base import MODELS
from phasetrain.models.mlp import MLP
from phasetrain.models.resnet_cifar import ResNetCifar
from phasetrain.models.small_cnn import SmallCNN

__all__ = ["MLP", "MODELS", "ResNetCifar", "SmallCNN"]
