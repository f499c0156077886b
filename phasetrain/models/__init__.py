"""Models by name (section MODEL)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.models.base import MODELS
from phasetrain.models.heads import HEADS, Embedding, TrunkHead
from phasetrain.models.mlp import MLP
from phasetrain.models.resnet import make_resnet
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
    "TrunkHead",
    "TrunkHeads",
    "make_resnet",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
