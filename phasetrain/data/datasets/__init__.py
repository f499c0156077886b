"""Datasets by name (`DATA.*.dataset`)."""

from phasetrain.data.datasets.base import DATASETS, Role, TensorSamples
from phasetrain.data.datasets.digits import load_digits
from phasetrain.data.datasets.file_list import FileList
from phasetrain.addons.libraries.huggingface import HuggingFace
from phasetrain.data.datasets.idx import load_idx, read_idx
from phasetrain.data.datasets.image_folder import ImageFolder
from phasetrain.data.datasets.lines import Lines
from phasetrain.addons.vision.masks.folder import ImageMaskFolder
from phasetrain.addons.vision.masks.stamps import Stamps
from phasetrain.addons.libraries.scikit_learn import NumberSamples, load_sklearn
from phasetrain.addons.text.sequences import Series, TokenPairs, load_cmudict, load_ucr
from phasetrain.data.datasets.synthetic import make_synthetic
from phasetrain.data.datasets.text import (
    IGNORED,
    ByteTokenizer,
    PackedTokens,
    load_alice,
    load_text,
)
from phasetrain.addons.libraries.torchvision import TorchvisionSamples, find_torchvision_dataset
from phasetrain.addons.libraries.webdataset import WebDataset
from phasetrain.data.datasets.windows import Windows, make_windows
from phasetrain.data.protocols import Described, Fingerprinted, Labelled, Samples

__all__ = [
    "DATASETS",
    "IGNORED",
    "ByteTokenizer",
    "Described",
    "FileList",
    "Fingerprinted",
    "HuggingFace",
    "ImageFolder",
    "ImageMaskFolder",
    "Labelled",
    "Lines",
    "NumberSamples",
    "PackedTokens",
    "Role",
    "Samples",
    "Series",
    "Stamps",
    "TensorSamples",
    "TokenPairs",
    "TorchvisionSamples",
    "WebDataset",
    "Windows",
    "find_torchvision_dataset",
    "load_alice",
    "load_cmudict",
    "load_digits",
    "load_idx",
    "load_sklearn",
    "load_text",
    "load_ucr",
    "make_synthetic",
    "make_windows",
    "read_idx",
]
