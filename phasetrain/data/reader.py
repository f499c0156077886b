"""Reading a draw: samples, transforms and collation, as a pure function of seed and draw."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from phasetrain.batch import Batch
from phasetrain.data.collate import Collate, stacked
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.sampler import Draw
from phasetrain.data.transforms.base import Keys, Pipeline, mix64
from phasetrain.errors import PhasetrainError
from phasetrain.machine import reseed_all, seed_of

MISFITS = (ValueError, TypeError, RuntimeError, IndexError)


class SampleError(PhasetrainError):
    """A sample could not be read; the message names the split, the sample and the cause (exit code 1)."""


class Reader(Dataset[Batch]):
    """The batches of one split.

    What a sample becomes depends on the run's seed, the split, the epoch, the sample's place in the epoch and its
    index: not on the worker that reads it, nor on the samples beside it.

    Args:
        dataset: the samples.
        pipeline: transforms of the input.
        collate: makes a batch of samples.
        seed: the run's seed.
    """

    def __init__(self, dataset: Any, pipeline: Pipeline, collate: Collate, *, seed: int) -> None:
        self.dataset = dataset
        self.pipeline = pipeline
        self._collate = collate
        self._seed = seed
        self._whole = _gathers(dataset) and pipeline.batched and collate is stacked
        self._plain = not pipeline.transforms

    @property
    def draws_at_random(self) -> bool:
        """Whether a part that is not ours may draw from the global generators while a sample is read."""
        return not self._whole

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw.

        Raises:
            SampleError: a sample could not be read, transformed or collated.
        """
        ids = torch.from_numpy(draw.indices)
        if not self._whole:
            return self._one_by_one(draw, ids)
        try:
            inputs, targets = self.dataset.__getitems__(ids)
            if not self._plain:
                inputs = self.pipeline(inputs, self.keys(draw))
        except MISFITS as error:
            raise SampleError(_no_batch(draw, error)) from error
        return Batch(inputs, targets, ids, len(draw.indices))

    def keys(self, draw: Draw) -> Keys:
        """Return the key material of each sample of a draw."""
        base = np.uint64(seed_of(self._seed, "sample", draw.split, draw.epoch))
        ordinals = np.arange(draw.ordinal, draw.ordinal + len(draw.indices), dtype=np.uint64)
        return Keys(mix64(mix64(ordinals ^ base) ^ draw.indices.astype(np.uint64)))

    def samples(self, draw: Draw) -> list[tuple[Any, Any]]:
        """Return the transformed samples of a draw one by one, each with the global generators seeded for it."""
        keys = self.keys(draw)
        return [
            self._sample(draw, int(index), seed, Keys(keys.values[at : at + 1]))
            for at, (index, seed) in enumerate(zip(draw.indices, keys.seeds(), strict=True))
        ]

    def with_pipeline(self, pipeline: Pipeline) -> "Reader":
        """Return a reader of the same samples with other transforms."""
        return Reader(self.dataset, pipeline, self._collate, seed=self._seed)

    def _one_by_one(self, draw: Draw, ids: torch.Tensor) -> Batch:
        samples = self.samples(draw)
        reseed_all(seed_of(self._seed, "collate", draw.split, draw.epoch, draw.ordinal))
        try:
            inputs, targets = self._collate(samples)
        except MISFITS as error:
            raise SampleError(_no_batch(draw, error)) from error
        return Batch(inputs, targets, ids, len(samples))

    def _sample(self, draw: Draw, index: int, seed: int, key: Keys) -> tuple[Any, Any]:
        reseed_all(seed)
        try:
            value, target = self.dataset[index]
            return self.pipeline.one(value, key), target
        except Exception as error:
            raise SampleError(
                f"DATA.{draw.split.upper()}: sample {index} cannot be read: {type(error).__name__}: {error}"
            ) from error


def _gathers(dataset: Any) -> bool:
    """Tell whether a data set is gathered by our own code; one that has code of its own there may draw at random."""
    kind = type(dataset)
    return (
        isinstance(dataset, TensorSamples)
        and kind.__getitem__ is TensorSamples.__getitem__
        and kind.__getitems__ is TensorSamples.__getitems__
    )


def _no_batch(draw: Draw, error: Exception) -> str:
    return f"DATA.{draw.split.upper()}: samples {draw.indices.tolist()} do not make a batch: {error}"
