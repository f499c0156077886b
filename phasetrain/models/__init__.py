"""Models by name (section MODEL)."""

from phasetrain.models.base import MODELS
from phasetrain.models.bridges import timm_model, torchvision_model, transformers_model
from phasetrain.models.heads import HEADS, Embedding, TrunkHead
from phasetrain.models.mlp import MLP
from phasetrain.models.resnet_cifar import ResNetCifar
from phasetrain.models.small_cnn import SmallCNN
from phasetrain.models.transformer import Transformer
from phasetrain.models.trunk_heads import TrunkHeads

__all__ = [
    "HEADS",
    "MLP",
    "MODELS",
    "Embedding",
    "ResNetCifar",
    "SmallCNN",
    "Transformer",
    "TrunkHead",
    "TrunkHeads",
    "timm_model",
    "torchvision_model",
    "transformers_model",
]
