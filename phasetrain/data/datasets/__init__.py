"""Datasets by name (`DATA.*.dataset`)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.data.datasets.base import DATASETS, Role, TensorSamples
    from phasetrain.data.datasets.digits import load_digits
    from phasetrain.data.datasets.idx import load_idx, read_idx
    from phasetrain.data.datasets.synthetic import make_synthetic
    from phasetrain.data.protocols import Described, Fingerprinted, Labelled, Samples
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "DATASETS",
    "Described",
    "Fingerprinted",
    "Labelled",
    "Role",
    "Samples",
    "TensorSamples",
    "load_digits",
    "load_idx",
    "make_synthetic",
    "read_idx",
]
