"""Data sets, transforms, samplers and loaders (section DATA)."""

from phasetrain.data.bad_samples import BadSamples, OnBadSample, SampleError
from phasetrain.data.collate import COLLATES, Collate
from phasetrain.data.datasets import DATASETS
from phasetrain.data.loader import LoaderSettings, PhaseLoader
from phasetrain.data.mixing import Mixed
from phasetrain.data.orders import Drawn
from phasetrain.data.own_loader import LOADERS, OwnLoader
from phasetrain.data.reader import Reader
from phasetrain.data.sampler import SAMPLERS, Draw, Growing, Order, PhaseSampler, Windowed
from phasetrain.data.source import Source
from phasetrain.data.staged import StagedReader, StagedSampler
from phasetrain.data.streams import Sharded, Stream, Streamed
from phasetrain.data.transforms import TRANSFORMS

__all__ = [
    "COLLATES",
    "DATASETS",
    "LOADERS",
    "SAMPLERS",
    "TRANSFORMS",
    "BadSamples",
    "Collate",
    "Draw",
    "Drawn",
    "Growing",
    "LoaderSettings",
    "Mixed",
    "OnBadSample",
    "Order",
    "OwnLoader",
    "PhaseLoader",
    "PhaseSampler",
    "Reader",
    "SampleError",
    "Sharded",
    "Source",
    "StagedReader",
    "StagedSampler",
    "Stream",
    "Streamed",
    "Windowed",
]
