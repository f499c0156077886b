"""Data sets, transforms, samplers and loaders (section DATA)."""

from phasetrain.data.bad_samples import BadSamples, OnBadSample, SampleError
from phasetrain.data.datasets import DATASETS
from phasetrain.data.datasets.streams import Stream, StreamDataset
from phasetrain.data.loading.collate import COLLATES, Collate
from phasetrain.data.loading.custom_loader import LOADERS, OwnLoader
from phasetrain.data.loading.loader import LoaderSettings, PhaseLoader
from phasetrain.data.loading.per_stage import StagedReader, StagedSampler
from phasetrain.data.loading.reader import Reader
from phasetrain.data.mixture import Mixed
from phasetrain.data.protocols import GrowingDataset, ShardedDataset, WindowedDataset
from phasetrain.data.samplers.lanes import Lanes
from phasetrain.data.samplers.named import Drawn
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Draw, Order, PhaseSampler
from phasetrain.data.samplers.source import Source
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
    "GrowingDataset",
    "Lanes",
    "LoaderSettings",
    "Mixed",
    "OnBadSample",
    "Order",
    "OwnLoader",
    "PhaseLoader",
    "PhaseSampler",
    "Reader",
    "SampleError",
    "ShardedDataset",
    "Source",
    "StagedReader",
    "StagedSampler",
    "Stream",
    "StreamDataset",
    "WindowedDataset",
]
