"""Data sets by name (`DATA.*.dataset`)."""

from phasetrain.data.datasets.base import DATASETS, Role, TensorSamples
from phasetrain.data.datasets.digits import digits
from phasetrain.data.datasets.huggingface import HuggingFace
from phasetrain.data.datasets.idx import idx, read_idx
from phasetrain.data.datasets.image_folder import ImageFolder
from phasetrain.data.datasets.lines import Lines
from phasetrain.data.datasets.synthetic import synthetic
from phasetrain.data.datasets.text import IGNORED, ByteTokenizer, PackedTokens, alice, text
from phasetrain.data.datasets.torchvision import TorchvisionSamples, torchvision_dataset
from phasetrain.data.datasets.webdataset import WebDataset
from phasetrain.data.datasets.windows import Windows, windows
from phasetrain.data.protocols import Described, Labelled, Samples

__all__ = [
    "DATASETS",
    "IGNORED",
    "ByteTokenizer",
    "Described",
    "HuggingFace",
    "ImageFolder",
    "Labelled",
    "Lines",
    "PackedTokens",
    "Role",
    "Samples",
    "TensorSamples",
    "TorchvisionSamples",
    "WebDataset",
    "Windows",
    "alice",
    "digits",
    "idx",
    "read_idx",
    "synthetic",
    "text",
    "torchvision_dataset",
    "windows",
]
