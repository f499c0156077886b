"""Models by name (section MODEL)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.models.base import HEADS, MODELS, Embedding
from phasetrain.models.mlp import MLP
from phasetrain.models.resnet_cifar import ResNetCifar
from phasetrain.models.small_cnn import SmallCNN
from phasetrain.models.trunk_heads import TrunkHeads

__all__ = [
    "HEADS",
    "MLP",
    "MODELS",
    "Embedding",
    "ResNetCifar",
    "SmallCNN",
    "TrunkHeads",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
