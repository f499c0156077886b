"""Datasets, transforms, samplers and loaders (section DATA)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.data.bad_samples import BadSamples, OnBadSample, SampleError
    from phasetrain.data.datasets.base import DATASETS
    from phasetrain.data.datasets.streams import Stream, StreamDataset
    from phasetrain.data.loading.collate import COLLATES, Collate
    from phasetrain.data.loading.custom_loader import LOADERS, CustomLoader
    from phasetrain.data.loading.loader import PhaseLoader
    from phasetrain.data.loading.per_stage import PerStageReader, PerStageSampler
    from phasetrain.data.loading.reader import SampleReader
    from phasetrain.data.loading.settings import LoaderSettings
    from phasetrain.data.protocols import GrowingDataset, ShardedDataset, WindowedDataset
    from phasetrain.data.samplers.named import DrawOrder
    from phasetrain.data.samplers.phase_sampler import SAMPLERS, Draw, PhaseSampler, SampleOrder
    from phasetrain.data.samplers.source import SampleSource
    from phasetrain.data.transforms.base import TRANSFORMS
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "COLLATES",
    "DATASETS",
    "LOADERS",
    "SAMPLERS",
    "TRANSFORMS",
    "BadSamples",
    "Collate",
    "CustomLoader",
    "Draw",
    "DrawOrder",
    "GrowingDataset",
    "LoaderSettings",
    "OnBadSample",
    "PerStageReader",
    "PerStageSampler",
    "PhaseLoader",
    "PhaseSampler",
    "SampleError",
    "SampleOrder",
    "SampleReader",
    "SampleSource",
    "ShardedDataset",
    "Stream",
    "StreamDataset",
    "WindowedDataset",
]
