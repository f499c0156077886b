"""Models by name (section MODEL)."""

from phasetrain.addons.vision.alexnet import AlexNet
from phasetrain.models.base import MODELS
from phasetrain.addons.libraries.models import (
    find_timm_model,
    find_torchvision_model,
    find_transformers_model,
)
from phasetrain.addons.vision.conditional_gan import ConditionalGAN
from phasetrain.models.heads import HEADS, Embedding, TrunkHead
from phasetrain.models.mlp import MLP
from phasetrain.models.resnet import make_resnet
from phasetrain.models.resnet_cifar import ResNetCifar
from phasetrain.addons.text.models import (
    Decodes,
    Seq2SeqGRU,
    Seq2SeqTransformer,
    SeriesFCN,
    SeriesResNet,
)
from phasetrain.models.small_cnn import SmallCNN
from phasetrain.addons.text.transformer import KeyValueCache, Transformer
from phasetrain.models.trunk_heads import TrunkHeads
from phasetrain.addons.vision.unet import UNet

__all__ = [
    "HEADS",
    "MLP",
    "MODELS",
    "AlexNet",
    "ConditionalGAN",
    "Decodes",
    "Embedding",
    "KeyValueCache",
    "ResNetCifar",
    "Seq2SeqGRU",
    "Seq2SeqTransformer",
    "SeriesFCN",
    "SeriesResNet",
    "SmallCNN",
    "Transformer",
    "TrunkHead",
    "TrunkHeads",
    "UNet",
    "find_timm_model",
    "find_torchvision_model",
    "find_transformers_model",
    "make_resnet",
]
