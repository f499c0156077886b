"""Data sets by name (`DATA.*.dataset`)."""

from phasetrain.data.datasets.base import DATASETS, Described, Samples, TensorSamples
from phasetrain.data.datasets.digits import digits
from phasetrain.data.datasets.idx import idx, read_idx
from phasetrain.data.datasets.image_folder import ImageFolder
from phasetrain.data.datasets.lines import Lines
from phasetrain.data.datasets.synthetic import synthetic

__all__ = [
    "DATASETS",
    "Described",
    "ImageFolder",
    "Lines",
    "Samples",
    "TensorSamples",
    "digits",
    "idx",
    "read_idx",
    "synthetic",
]
