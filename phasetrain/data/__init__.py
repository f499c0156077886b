"""Data sets, transforms, samplers and loaders (section DATA)."""

from phasetrain.data.bad_samples import BadSamples, OnBadSample, SampleError
from phasetrain.data.datasets import DATASETS
from phasetrain.data.loading.collate import COLLATES, Collate
from phasetrain.data.loading.custom_loader import LOADERS, OwnLoader
from phasetrain.data.loading.loader import LoaderSettings, PhaseLoader
from phasetrain.data.loading.per_stage import StagedReader, StagedSampler
from phasetrain.data.loading.reader import Reader
from phasetrain.data.mixture import Mixed
from phasetrain.data.samplers.named import Drawn
from phasetrain.data.samplers.phase_sampler import (
    SAMPLERS,
    Draw,
    Growing,
    Order,
    PhaseSampler,
    Windowed,
)
from phasetrain.data.samplers.source import Source
from phasetrain.data.samplers.streams import Sharded, Stream, Streamed
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
