"""Data sets, transforms, samplers and loaders (section DATA)."""

from phasetrain.data.bad_samples import BadSamples, OnBadSample, SampleError
from phasetrain.data.collate import COLLATES, Collate
from phasetrain.data.datasets import DATASETS
from phasetrain.data.loader import LoaderSettings, PhaseLoader
from phasetrain.data.reader import Reader
from phasetrain.data.sampler import SAMPLERS, Draw, Order, PhaseSampler
from phasetrain.data.streams import Sharded, Stream, Streamed
from phasetrain.data.transforms import TRANSFORMS

__all__ = [
    "COLLATES",
    "DATASETS",
    "SAMPLERS",
    "TRANSFORMS",
    "BadSamples",
    "Collate",
    "Draw",
    "LoaderSettings",
    "OnBadSample",
    "Order",
    "PhaseLoader",
    "PhaseSampler",
    "Reader",
    "SampleError",
    "Sharded",
    "Stream",
    "Streamed",
]
