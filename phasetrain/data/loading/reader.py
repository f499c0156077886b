"""Reads a draw: samples, transforms and collation, as a pure function of seed and draw."""

import logging
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.data.bad_samples import (
    SHOWN,
    BadPairs,
    BatchError,
    OnBadSample,
    SampleError,
    Unreadable,
    format_samples,
)
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.loading.collate import (
    Collate,
    collate_targets,
    describe_form,
    find_common_form,
    stack_samples,
)
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Keys, Pipeline, mix64
from phasetrain.engine.batch import Batch, mapped
from phasetrain.errors import is_out_of_memory
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import (
    GLOBAL_GENERATORS,
    GeneratorWatch,
    mix_seed,
    reseed_all,
    seed_of,
)

log = logging.getLogger(__name__)


MISFITS = (ValueError, TypeError, RuntimeError, IndexError)
SUBSTITUTES = 10
"""Maximum number of substitutes that are tried for a bad sample."""

Sample = tuple[Any, Any]
"""Transformed input, and target."""


class SampleReader(Dataset[Batch]):
    """The batches of one split.

    A sample is a function of the seed of the run, the split, the epoch, its position in the epoch
    and its index: not of the worker that reads it, nor of the other samples of its batch. The same
    holds for the substitute of a sample that cannot be read.

    Seeding the global generators for each sample would cost more than reading one from memory. So
    only those are seeded that the dataset and the transforms use, and the others are watched. A
    batch that draws from one of these is read again with all seeded; if that happens in more than
    a quarter of the batches, the generator is seeded from then on.

    Args:
        dataset: the samples.
        pipeline: transforms of the input.
        collate: makes a batch of samples.
        seed: seed of the run.
        on_bad_sample: policy for a sample that cannot be read; a dataset that is gathered by whole
            batches always raises.
        selection: which values of a sample are input and target.
        chosen: indices of the samples in use, if not all; substitutes are among them.

    Attributes:
        seeded_generators: names of the global generators that are seeded for each sample.
        reads_lists: read batches by the dataset's `__getitems__`, which takes a list of indices and
            returns a list of samples; set by `check_seeded` once it returns the same samples.
    """

    def __init__(
        self,
        dataset: Any,
        pipeline: Pipeline,
        collate: Collate,
        *,
        seed: int,
        on_bad_sample: OnBadSample = "raise",
        selection: FieldSelection | None = None,
        chosen: Indices | None = None,
    ) -> None:
        self.dataset = dataset
        self.pipeline = pipeline
        self.on_bad_sample = on_bad_sample
        self._collate = collate
        self._seed = seed
        self.selection = selection or FieldSelection()
        self.chosen = chosen
        # Batches are gathered as a whole only if every part is ours: such parts never draw from the
        # global generators, so these need not be seeded for each sample.
        self._whole = (
            _is_gathered(dataset)
            and pipeline.is_batched
            and collate is stack_samples
            and self.selection.keeps_inputs
        )
        self.seeded_generators: frozenset[str] = frozenset()
        self._watch = GeneratorWatch()
        # As if 8 batches had drawn nothing: a draw in one of the first says little.
        self._watched_batches = 8
        self._repeated_batches = 0
        self.reads_lists = False
        self._given = self.selection == FieldSelection(where=self.selection.where)
        self._plain = not pipeline.transforms
        self._stacks = collate is stack_samples
        # Transforms of whole batches at the end run on the stacked samples, which costs a tenth.
        self._batched_from = len(pipeline.transforms)
        if self._stacks:
            self._batched_from = pipeline.find_batched_end()

    @property
    def draws_at_random(self) -> bool:
        """Whether a part that is not ours may draw from the global generators while a sample is
        read."""
        return not self._whole

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw; of size 0, without input, if all samples are bad and dropped.

        Raises:
            SampleError: a sample and all its substitutes cannot be read or transformed, or the
                samples do not form a batch.
        """
        if not draw.counts:
            return self[draw._replace(counts=True)].as_stand_in()
        if not self._whole:
            return self._read_batch(draw)
        ids = torch.from_numpy(draw.indices)
        try:
            inputs, targets = self.dataset.__getitems__(ids)
            if not self._plain:
                inputs = self.pipeline(inputs, self.make_keys(draw))
        except MISFITS as error:
            if is_out_of_memory(error):
                raise
            raise BatchError(_describe_misfit(draw.split, draw.indices.tolist(), error)) from error
        if not self._given:
            targets = self.selection.select_targets(targets, ids)
        return Batch(inputs, targets, ids, len(draw.indices))

    def padding(self, draw: Draw) -> Batch:
        """Return a fully masked batch, for a rank that has lost all its samples.

        Raises:
            SampleError: no substitute can be read either.
        """
        # Even if bad samples are dropped, because the forward pass of this rank needs real inputs.
        return self._copy_with(self.pipeline, "substitute")[
            draw._replace(counts=True)
        ].as_stand_in()

    def make_keys(self, draw: Draw) -> Keys:
        """Return the key material of each sample of a draw."""
        base = np.uint64(seed_of(self._seed, "sample", draw.split, draw.epoch))
        ordinals = np.arange(draw.ordinal, draw.ordinal + len(draw.indices), dtype=np.uint64)
        # Position and index both enter the key: a sample that is drawn twice in an epoch is
        # augmented differently each time, and neither the batch size nor the world size matters.
        return Keys(mix64(mix64(ordinals ^ base) ^ draw.indices.astype(np.uint64)))

    def read_samples(
        self, draw: Draw, generators: Collection[str] = GLOBAL_GENERATORS
    ) -> Sequence[Sample | Unreadable]:
        """Return the transformed samples of a draw one by one, with the global generators seeded
        for each.

        Raises:
            SampleError: one cannot be read, and `on_bad_sample` is to raise; otherwise it is
                `Unreadable`.
        """
        return self._read_seeded(draw, len(self.pipeline.transforms), generators)

    def read_unseeded(self, draw: Draw) -> Sequence[Sample | Unreadable]:
        """Return the transformed samples of a draw, without seeding the global generators.

        Raises:
            SampleError: see `read_samples`.
        """
        return self._read_unseeded(draw, len(self.pipeline.transforms))

    def with_pipeline(self, pipeline: Pipeline) -> "SampleReader":
        """Return a reader of the same samples with other transforms."""
        return self._copy_with(pipeline, self.on_bad_sample)

    def _copy_with(self, pipeline: Pipeline, on_bad_sample: OnBadSample) -> "SampleReader":
        return SampleReader(
            self.dataset,
            pipeline,
            self._collate,
            seed=self._seed,
            on_bad_sample=on_bad_sample,
            selection=self.selection,
            chosen=self.chosen,
        )

    def _read_batch(self, draw: Draw) -> Batch:
        stacked, found = self._transform_rest(draw, self._read_watched(draw))
        ids = torch.from_numpy(draw.indices)
        samples: Sequence[Any] = found
        bad: BadPairs = ()
        if stacked is None and self.on_bad_sample != "raise":
            ids, samples, bad = self._replace_bad_samples(draw, found)
        if not samples:
            return Batch(None, None, ids, 0, bad=bad)
        try:
            if stacked is None:
                inputs, targets = self._collate_samples(draw, samples)
            else:
                inputs, targets = stacked, collate_targets([target for _, target in samples])
        except Exception as error:
            # Any type, because a collate function may index and look up whatever it likes.
            if is_out_of_memory(error):
                raise
            raise BatchError(_describe_misfit(draw.split, ids.tolist(), error)) from error
        return Batch(inputs, targets, ids, len(samples), bad=bad)

    def _collate_samples(self, draw: Draw, samples: Sequence[Sample]) -> Any:
        if not self._stacks:
            # A collate function may draw too; its seed is independent of how much the transforms
            # have drawn.
            reseed_all(seed_of(self._seed, "collate", draw.split, draw.epoch, draw.ordinal))
        return self._collate(samples)

    def _read_watched(self, draw: Draw) -> Sequence[Sample | Unreadable]:
        """Return the samples of a draw, without the transforms of whole batches at the end of the
        pipeline; every generator that they draw from is seeded for each."""
        seeded = self.seeded_generators
        self._watched_batches += 1
        self._watch.start()
        try:
            if seeded:
                found = self._read_seeded(draw, self._batched_from, seeded)
            else:
                found = self._read_unseeded(draw, self._batched_from)
        except SampleError:
            drawn = self._watch.stop() - seeded
            # With a draw, the error may be due to what was drawn.
            if not drawn:
                raise
        else:
            drawn = self._watch.stop() - seeded
            if not drawn:
                return found
        self._repeated_batches += 1
        # A dataset that draws in one sample of thousands is faster if a few batches are read twice.
        if 4 * self._repeated_batches > self._watched_batches:
            self.seeded_generators = seeded | drawn
        return self._read_seeded(draw, self._batched_from, GLOBAL_GENERATORS)

    def _read_seeded(
        self, draw: Draw, end: int, generators: Collection[str]
    ) -> Sequence[Sample | Unreadable]:
        keys = self.make_keys(draw)
        found = []
        for at, seed in enumerate(keys.make_seeds()):
            reseed_all(seed, generators)
            index = int(draw.indices[at])
            found.append(self._read_sample(draw.split, index, keys.select(at), end))
        return found

    def _read_unseeded(self, draw: Draw, end: int) -> Sequence[Sample | Unreadable]:
        # A batch with an error is read again one by one, to find out which sample it is. With a
        # dataset in which errors are expected, that would cost more than it gains.
        if self.reads_lists or self.on_bad_sample == "raise":
            try:
                return self._read_at_once(draw, end)
            except Exception as error:  # noqa: BLE001 - it comes again with the sample's number
                log.debug("DATA.%s: a batch cannot be read: %r", draw.split.upper(), error)
        keys = self.make_keys(draw)
        return [
            self._read_sample(draw.split, index, keys.select(at), end)
            for at, index in enumerate(draw.indices.tolist())
        ]

    def _read_at_once(self, draw: Draw, end: int) -> Sequence[Sample]:
        """Return the samples of a draw after the first `end` transforms, with as few calls per
        sample as possible."""
        indices = draw.indices.tolist()
        if self.reads_lists:
            given = self.dataset.__getitems__(indices)
        else:
            given = [self.dataset[index] for index in indices]
        samples = self.selection.split_samples(given, indices)
        if end:
            keys = self.make_keys(draw)
            samples = [
                (self.pipeline.transform_sample(value, keys.select(at), 0, end), target)
                for at, (value, target) in enumerate(samples)
            ]
        inputs = [value for value, _ in samples]
        if set(map(type, inputs)) != {Tensor} or not all(map(Tensor.numel, inputs)):
            for value in inputs:
                _check_input(value)
        return samples

    def _transform_rest(
        self, draw: Draw, found: Sequence[Sample | Unreadable]
    ) -> tuple[Any, Sequence[Sample | Unreadable]]:
        """Apply the transforms of whole batches at the end of the pipeline.

        Returns:
            The stacked inputs, and the samples before. Without such transforms, or if the samples
            cannot be stacked, None and the samples, transformed one by one.
        """
        keys = None
        for position in range(self._batched_from, len(self.pipeline.transforms)):
            keys = keys or self.make_keys(draw)
            stacked = self._transform_stacked(found, keys, position)
            if stacked is not None:
                return stacked, found
            found = [
                self._transform_one(draw, sample, at, keys.select(at), position)
                for at, sample in enumerate(found)
            ]
        return None, found

    def _transform_stacked(self, found: Sequence[Any], keys: Keys, begin: int) -> Any:
        """Return the transformed batch of all samples; None if they cannot be stacked."""
        if any(isinstance(sample, Unreadable) for sample in found):
            return None
        inputs = [value for value, _ in found]
        if not _have_one_form(inputs):
            return None
        try:
            batch = self.pipeline(torch.stack(inputs), keys, begin)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # One by one, to find out which sample it is.
            log.debug("samples are transformed one by one", exc_info=True)
            return None
        if isinstance(batch, Tensor) and not batch.numel():
            return None
        # As stacked samples are: kernels may choose their algorithm by the memory layout.
        return mapped(batch, Tensor.contiguous)

    def _transform_one(
        self, draw: Draw, sample: Sample | Unreadable, at: int, key: Keys, position: int
    ) -> Sample | Unreadable:
        if isinstance(sample, Unreadable):
            return sample
        value, target = sample
        try:
            value = self.pipeline.transform_sample(value, key, position, position + 1)
            return _check_input(value), target
        except Exception as error:  # noqa: BLE001 - raised again there unless it is tolerated
            return self._handle_bad_sample(draw.split, int(draw.indices[at]), error)

    def _replace_bad_samples(
        self, draw: Draw, found: Sequence[Sample | Unreadable]
    ) -> tuple[Tensor, list[Sample], BadPairs]:
        """Return indices and samples for a batch, and the bad samples that were met."""
        good = [sample for sample in found if not isinstance(sample, Unreadable)]
        wanted = find_common_form(good) if self._stacks else None
        ids: list[int] = []
        samples: list[Sample] = []
        bad: dict[int, str] = {}
        for ordinal, (index, sample) in enumerate(
            zip(draw.indices.tolist(), found, strict=True), draw.ordinal
        ):
            taken, sample = index, _check_form(sample, wanted)
            if isinstance(sample, Unreadable):
                bad.setdefault(index, sample.reason)
                if self.on_bad_sample == "drop":
                    continue
                taken, sample = self._find_substitute(draw, ordinal, index, wanted, bad)
                wanted = (
                    describe_form(sample) if self._stacks else None
                )  # where no sample of the draw itself was good
            ids.append(taken)
            samples.append(sample)
        return torch.tensor(ids, dtype=torch.int64), samples, tuple(bad.items())

    def _find_substitute(
        self, draw: Draw, ordinal: int, index: int, wanted: str | None, bad: dict[int, str]
    ) -> tuple[int, Sample]:
        """Return index and sample of a substitute for a bad sample; bad ones on the way are added
        to `bad`."""
        places = range(len(self.dataset)) if self.chosen is None else self.chosen
        own = int(np.searchsorted(places, index)) if self.chosen is not None else index
        others = len(places) - 1
        for attempt in range(SUBSTITUTES if others else 0):
            word = seed_of(
                self._seed, "substitute", draw.split, draw.epoch, ordinal, index, attempt
            )
            # The bias of the remainder of a 64-bit word is negligible: below others / 2**64.
            other = word % others
            # The bad sample itself is skipped, so that it is never its own substitute.
            other = int(places[other + (other >= own)])
            key = Keys([mix_seed(word, other)])
            reseed_all(key.make_seeds()[0])
            sample = self._read_sample(draw.split, other, key, len(self.pipeline.transforms))
            sample = _check_form(sample, wanted)
            if not isinstance(sample, Unreadable):
                return other, sample
            bad.setdefault(other, sample.reason)
        where = f"DATA.{draw.split.upper()}"
        raise SampleError(
            f"{where}.on_bad_sample = 'substitute': sample {index} cannot be read, nor can up to "
            f"{SUBSTITUTES} substitutes; the last ones: "
            f"{format_samples(list(bad.items())[-SHOWN:])}; fix the data, or set "
            f"{where}.on_bad_sample=drop",
            code="data.no_substitute",
        )

    def _read_sample(self, split: str, index: int, key: Keys, end: int) -> Sample | Unreadable:
        """Return a sample after the first `end` transforms."""
        try:
            value, target = self.selection.split_sample(self.dataset[index], index)
            return _check_input(self.pipeline.transform_sample(value, key, 0, end)), target
        except Exception as error:  # noqa: BLE001 - raised again there unless it is tolerated
            return self._handle_bad_sample(split, index, error)

    def _handle_bad_sample(self, split: str, index: int, error: Exception) -> Unreadable:
        """Return the placeholder of a bad sample.

        Raises:
            SampleError: `on_bad_sample` is to raise.
        """
        if self.on_bad_sample != "raise":
            return Unreadable.from_error(error)
        where = f"DATA.{split.upper()}"
        raise SampleError(
            f"{where}: sample {index} cannot be read: {type(error).__name__}: {error}; fix it, "
            f"or set {where}.on_bad_sample to substitute or drop",
            code="data.unreadable_sample",
        ) from error


def is_reading_here(frame: FrameType | None) -> bool:
    """Return whether code at `frame` was called to read a batch in this process."""
    while frame is not None and frame.f_code is not SampleReader.__getitem__.__code__:
        frame = frame.f_back
    return frame is not None


def _is_gathered(dataset: Any) -> bool:
    """Return whether batches come from `TensorSamples` itself; a subclass with custom access may
    draw at random."""
    kind = type(dataset)
    return (
        isinstance(dataset, TensorSamples)
        and kind.__getitem__ is TensorSamples.__getitem__
        and kind.__getitems__ is TensorSamples.__getitems__
    )


def _check_input(value: Any) -> Any:
    if value is None:
        raise ValueError("its input is None; the dataset or a transform returns nothing")
    if (isinstance(value, Tensor) and value.numel() == 0) or (
        isinstance(value, np.ndarray) and value.size == 0
    ):
        raise ValueError(f"its input is empty: {describe_form(value)}")
    return value


def _have_one_form(inputs: Sequence[Any]) -> bool:
    """Return whether all inputs are tensors of one shape and type."""
    forms = {(one.shape, one.dtype) if isinstance(one, Tensor) else None for one in inputs}
    return len(forms) == 1 and None not in forms


def _check_form(sample: Sample | Unreadable, wanted: str | None) -> Sample | Unreadable:
    """Return the sample if it has the required form, if any."""
    if isinstance(sample, Unreadable) or wanted is None or describe_form(sample) == wanted:
        return sample
    return Unreadable(f"it is {describe_form(sample)}, and the others of its batch are {wanted}")


def _describe_misfit(split: str, indices: Sequence[int], error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return (
        f"DATA.{split.upper()}: samples {join_first(indices, SHOWN)} do not form a batch: "
        f"{kind}{error}"
    )
