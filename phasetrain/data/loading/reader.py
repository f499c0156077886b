"""Reading a draw: samples, transforms and collation, as a pure function of seed and draw."""

from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from phasetrain.data.bad_samples import (
    SHOWN,
    BadPairs,
    OnBadSample,
    SampleError,
    Unreadable,
    named,
)
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.loading.collate import Collate, common_form, form, stacked
from phasetrain.data.loading.fields import Selection
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Keys, Pipeline, mix64
from phasetrain.engine.batch import Batch
from phasetrain.errors import is_out_of_memory
from phasetrain.runtime.machine import mix_seed, reseed_all, seed_of

MISFITS = (ValueError, TypeError, RuntimeError, IndexError)
SUBSTITUTES = 10
"""How many other samples are tried in the place of a bad one."""

Sample = tuple[Any, Any]
"""Transformed input, and target."""


class Reader(Dataset[Batch]):
    """The batches of one split.

    What a sample becomes depends on the run's seed, the split, the epoch, the sample's place in the
    epoch and its index: not on the worker that reads it, nor on the samples beside it. So does what
    takes the place of one that cannot be read.

    Args:
        dataset: the samples.
        pipeline: transforms of the input.
        collate: makes a batch of samples.
        seed: the run's seed.
        on_bad_sample: what to do with a sample that cannot be read; one of a data set that is
            gathered by whole batches always raises.
        selection: which values of a sample are input and target.
        chosen: indices of the samples that take part, where not all do; others stand in for no bad
            one.
    """

    def __init__(
        self,
        dataset: Any,
        pipeline: Pipeline,
        collate: Collate,
        *,
        seed: int,
        on_bad_sample: OnBadSample = "raise",
        selection: Selection | None = None,
        chosen: Indices | None = None,
    ) -> None:
        self.dataset = dataset
        self.pipeline = pipeline
        self.on_bad_sample = on_bad_sample
        self._collate = collate
        self._seed = seed
        self.selection = selection or Selection()
        self.chosen = chosen
        self._whole = (
            _gathers(dataset)
            and pipeline.batched
            and collate is stacked
            and self.selection.keeps_inputs
        )
        self._given = self.selection == Selection(where=self.selection.where)
        self._plain = not pipeline.transforms
        self._stacks = collate is stacked

    @property
    def draws_at_random(self) -> bool:
        """Whether a part that is not ours may draw from the global generators while a sample is
        read."""
        return not self._whole

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw; one of size 0, without input, where all samples are bad and
        dropped.

        Raises:
            SampleError: a sample could not be read or transformed, none that was tried in its place
                could either, or the samples do not make a batch.
        """
        if not draw.counts:
            return self[draw._replace(counts=True)].as_stand_in()
        if not self._whole:
            return self._one_by_one(draw)
        ids = torch.from_numpy(draw.indices)
        try:
            inputs, targets = self.dataset.__getitems__(ids)
            if not self._plain:
                inputs = self.pipeline(inputs, self.keys(draw))
        except MISFITS as error:
            if is_out_of_memory(error):
                raise
            raise SampleError(_no_batch(draw.split, draw.indices.tolist(), error)) from error
        if not self._given:
            targets = self.selection.of_batch(targets, ids)
        return Batch(inputs, targets, ids, len(draw.indices))

    def stand_in(self, draw: Draw) -> Batch:
        """Return a batch of which nothing counts, in place of one that has lost all its samples.

        Raises:
            SampleError: no other samples that were tried can be read either.
        """
        return self._like(self.pipeline, "substitute")[draw._replace(counts=True)].as_stand_in()

    def keys(self, draw: Draw) -> Keys:
        """Return the key material of each sample of a draw."""
        base = np.uint64(seed_of(self._seed, "sample", draw.split, draw.epoch))
        ordinals = np.arange(draw.ordinal, draw.ordinal + len(draw.indices), dtype=np.uint64)
        return Keys(mix64(mix64(ordinals ^ base) ^ draw.indices.astype(np.uint64)))

    def samples(self, draw: Draw) -> list[Sample | Unreadable]:
        """Return the transformed samples of a draw one by one, each with the global generators
        seeded for it.

        Raises:
            SampleError: one cannot be read, and `on_bad_sample` is to raise; otherwise `Unreadable`
                stands for it.
        """
        keys = self.keys(draw)
        return [
            self._sample(draw.split, int(index), seed, Keys(keys.values[at : at + 1]))
            for at, (index, seed) in enumerate(zip(draw.indices, keys.seeds(), strict=True))
        ]

    def with_pipeline(self, pipeline: Pipeline) -> "Reader":
        """Return a reader of the same samples with other transforms."""
        return self._like(pipeline, self.on_bad_sample)

    def _like(self, pipeline: Pipeline, on_bad_sample: OnBadSample) -> "Reader":
        return Reader(
            self.dataset,
            pipeline,
            self._collate,
            seed=self._seed,
            on_bad_sample=on_bad_sample,
            selection=self.selection,
            chosen=self.chosen,
        )

    def _one_by_one(self, draw: Draw) -> Batch:
        ids, samples, bad = self._readable(draw)
        if not samples:
            return Batch(None, None, torch.zeros(0, dtype=torch.int64), 0, bad=bad)
        reseed_all(seed_of(self._seed, "collate", draw.split, draw.epoch, draw.ordinal))
        try:
            inputs, targets = self._collate(samples)
        except MISFITS as error:
            if is_out_of_memory(error):
                raise
            raise SampleError(_no_batch(draw.split, ids, error)) from error
        return Batch(inputs, targets, torch.tensor(ids), len(samples), bad=bad)

    def _readable(self, draw: Draw) -> tuple[list[int], list[Sample], BadPairs]:
        """Return indices and samples to make a batch of, and the bad samples that were met."""
        found = self.samples(draw)
        good = [sample for sample in found if not isinstance(sample, Unreadable)]
        if self.on_bad_sample == "raise":
            return draw.indices.tolist(), good, ()
        wanted = common_form(good) if self._stacks else None
        ids: list[int] = []
        samples: list[Sample] = []
        bad: dict[int, str] = {}
        for ordinal, (index, sample) in enumerate(
            zip(draw.indices.tolist(), found, strict=True), draw.ordinal
        ):
            taken, sample = index, _fitting(sample, wanted)
            if isinstance(sample, Unreadable):
                bad.setdefault(index, sample.reason)
                if self.on_bad_sample == "drop":
                    continue
                taken, sample = self._substitute(draw, ordinal, index, wanted, bad)
                wanted = (
                    form(sample) if self._stacks else None
                )  # where no sample of the draw itself was good
            ids.append(taken)
            samples.append(sample)
        return ids, samples, tuple(bad.items())

    def _substitute(
        self, draw: Draw, ordinal: int, index: int, wanted: str | None, bad: dict[int, str]
    ) -> tuple[int, Sample]:
        """Return index and sample of what takes the place of a bad one; bad ones met on the way are
        added to `bad`."""
        places = range(len(self.dataset)) if self.chosen is None else self.chosen
        own = int(np.searchsorted(places, index)) if self.chosen is not None else index
        others = len(places) - 1
        for attempt in range(SUBSTITUTES if others else 0):
            word = seed_of(
                self._seed, "substitute", draw.split, draw.epoch, ordinal, index, attempt
            )
            other = word % others
            other = int(places[other + (other >= own)])
            key = Keys([mix_seed(word, other)])
            sample = _fitting(self._sample(draw.split, other, key.seeds()[0], key), wanted)
            if not isinstance(sample, Unreadable):
                return other, sample
            bad.setdefault(other, sample.reason)
        where = f"DATA.{draw.split.upper()}"
        raise SampleError(
            f"{where}.on_bad_sample = 'substitute': sample {index} cannot be read, nor can any other one tried in its "
            f"place (up to {SUBSTITUTES}); the last are {named(list(bad.items())[-SHOWN:])}; mend the data, or set "
            f"{where}.on_bad_sample=drop"
        )

    def _sample(self, split: str, index: int, seed: int, key: Keys) -> Sample | Unreadable:
        reseed_all(seed)
        try:
            value, target = self.selection.pair(self.dataset[index], index)
            return _filled(self.pipeline.one(value, key)), target
        except Exception as error:
            if self.on_bad_sample != "raise":
                return Unreadable.by(error)
            where = f"DATA.{split.upper()}"
            raise SampleError(
                f"{where}: sample {index} cannot be read: {type(error).__name__}: {error}; mend it, or put up with it "
                f"by {where}.on_bad_sample=substitute or drop"
            ) from error


def reads_here(frame: FrameType | None) -> bool:
    """Tell whether code at `frame` was called to read a batch in this process."""
    while frame is not None and frame.f_code is not Reader.__getitem__.__code__:
        frame = frame.f_back
    return frame is not None


def _gathers(dataset: Any) -> bool:
    """Tell whether a data set is gathered by our own code; one that has code of its own there may
    draw at random."""
    kind = type(dataset)
    return (
        isinstance(dataset, TensorSamples)
        and kind.__getitem__ is TensorSamples.__getitem__
        and kind.__getitems__ is TensorSamples.__getitems__
    )


def _filled(value: Any) -> Any:
    if value is None:
        raise ValueError("its input is None; a data set or a transform returns nothing")
    if (isinstance(value, torch.Tensor) and value.numel() == 0) or (
        isinstance(value, np.ndarray) and value.size == 0
    ):
        raise ValueError(f"its input is empty: {form(value)}")
    return value


def _fitting(sample: Sample | Unreadable, wanted: str | None) -> Sample | Unreadable:
    """Return the sample if it has the form that all of a batch must have, where they must."""
    if isinstance(sample, Unreadable) or wanted is None or form(sample) == wanted:
        return sample
    return Unreadable(f"it is {form(sample)}, and the others of its batch are {wanted}")


def _no_batch(split: str, indices: Sequence[int], error: Exception) -> str:
    return f"DATA.{split.upper()}: samples {list(indices)} do not make a batch: {error}"
