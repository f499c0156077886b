"""Reads a draw: samples, transforms and collation, as a pure function of seed and draw."""

import logging
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.data.bad_samples import (
    MAX_LISTED,
    BadPairs,
    BatchError,
    OnBadSample,
    SampleError,
    Unreadable,
)
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.collate import (
    Collate,
    UnequalShapesError,
    collate_targets,
    stack_samples,
)
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.single_samples import Sample, SingleSamples
from phasetrain.data.loading.substitutes import BadSampleReplacer
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Keys, Pipeline
from phasetrain.engine.batch import Batch
from phasetrain.errors import SHAPE_ERRORS, is_out_of_memory
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import (
    GLOBAL_GENERATORS,
    GeneratorWatch,
    reseed_all,
    seed_of,
)
from phasetrain.runtime.nested import map_tensors

log = logging.getLogger(__name__)


class BatchReader(Protocol):
    """Makes the batches of a split: a `SampleReader`, or the reader of a dataset that composes its
    batches itself.

    Attributes:
        dataset: the samples.
        on_bad_sample: policy for a sample that cannot be read.
    """

    dataset: Any
    on_bad_sample: OnBadSample

    @property
    def draws_at_random(self) -> bool:
        """Whether foreign code may draw from the global generators while a sample is read."""
        ...

    def __getitem__(self, draw: Draw, /) -> Batch: ...

    def padding(self, draw: Draw) -> Batch:
        """Return a fully masked batch."""
        ...

    def list_readers(self) -> "list[SampleReader]":
        """Return the readers of single samples, one for each source."""
        ...

    def join_targets(self, targets: Sequence[Any]) -> Any:
        """Return the target of a batch that has one target for each of these readers."""
        ...


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
        self._samples = SingleSamples(dataset, pipeline, self.selection, seed, on_bad_sample)
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
        self._replacer = BadSampleReplacer(
            self._samples,
            dataset,
            chosen,
            len(pipeline.transforms),
            seed=seed,
            stacks=self._stacks,
            drops=on_bad_sample == "drop",
        )

    @property
    def draws_at_random(self) -> bool:
        """Whether a part that is not ours may draw from the global generators while a sample is
        read."""
        return not self._whole

    def list_readers(self) -> "list[SampleReader]":
        """Return the reader itself: it has one source."""
        return [self]

    def join_targets(self, targets: Sequence[Any]) -> Any:
        """Return the only target."""
        return targets[0]

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the batch of a draw; of size 0, without input, if all samples are bad and dropped.

        Raises:
            SampleError: a sample and all its substitutes cannot be read or transformed, or the
                samples do not form a batch.
        """
        if not draw.counts:
            return self[draw._replace(counts=True)].as_padding()
        if not self._whole:
            return self._read_batch(draw)
        ids = torch.from_numpy(draw.indices)
        try:
            inputs, targets = self.dataset.__getitems__(ids)
            if not self._plain:
                keys = self._samples.make_keys(draw)
                inputs = self.pipeline(inputs, keys)
                if self.pipeline.makes_targets:
                    targets = torch.tensor(self.pipeline.make_targets(keys))
        except SHAPE_ERRORS as error:
            if is_out_of_memory(error):
                raise
            raise BatchError(
                _describe_shape_error(draw.split, draw.indices.tolist(), error)
            ) from error
        if not self._given and not self.pipeline.makes_targets:
            targets = self.selection.select_targets(targets, ids)
        return Batch(inputs, targets, ids, len(draw.indices))

    def padding(self, draw: Draw) -> Batch:
        """Return a fully masked batch, for a rank that has lost all its samples.

        Raises:
            SampleError: no substitute can be read either.
        """
        # Even if bad samples are dropped, because the forward pass of this rank needs real inputs.
        return self.with_policy("substitute")[draw._replace(counts=True)].as_padding()

    def read_samples(
        self, draw: Draw, generators: Collection[str] = GLOBAL_GENERATORS
    ) -> Sequence[Sample | Unreadable]:
        """Return the transformed samples of a draw one by one, with the global generators seeded
        for each.

        Raises:
            SampleError: one cannot be read, and `on_bad_sample` is to raise; otherwise it is
                `Unreadable`.
        """
        return self._samples.read_seeded(draw, len(self.pipeline.transforms), generators)

    def read_unseeded(self, draw: Draw) -> Sequence[Sample | Unreadable]:
        """Return the transformed samples of a draw, without seeding the global generators.

        Raises:
            SampleError: see `read_samples`.
        """
        return self._samples.read_unseeded(
            draw, len(self.pipeline.transforms), as_list=self.reads_lists
        )

    def with_pipeline(self, pipeline: Pipeline) -> "SampleReader":
        """Return a reader of the same samples with other transforms."""
        return self._copy_with(pipeline, self.on_bad_sample)

    def with_policy(self, on_bad_sample: OnBadSample) -> "SampleReader":
        """Return a reader of the same samples with another policy for bad ones."""
        return self._copy_with(self.pipeline, on_bad_sample)

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
        stacked, unstacked = self._transform_rest(draw, self._read_watched(draw))
        ids = torch.from_numpy(draw.indices)
        samples: Sequence[Any] = unstacked
        bad: BadPairs = ()
        if stacked is None and self.on_bad_sample != "raise":
            ids, samples, bad = self._replacer.replace_bad_samples(draw, unstacked)
        if not samples:
            return Batch(None, None, ids, 0, bad=bad)
        try:
            if stacked is None:
                inputs, targets = self._collate_samples(draw, samples)
            else:
                inputs = stacked
                targets = collate_targets([target for _, target in samples])
        except Exception as error:
            # Any type, because a collate function may index and look up whatever it likes.
            if is_out_of_memory(error):
                raise
            advised = _advise_size(error, self.dataset, self.selection.where)
            raise BatchError(_describe_shape_error(draw.split, ids.tolist(), advised)) from error
        return Batch(inputs, targets, ids, len(samples), bad=bad, position=self._save_position())

    def _save_position(self) -> Any:
        if isinstance(self.dataset, ForwardDataset):
            return self.dataset.save_position()
        return None

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
                samples = self._samples.read_seeded(draw, self._batched_from, seeded)
            else:
                samples = self._samples.read_unseeded(
                    draw, self._batched_from, as_list=self.reads_lists
                )
        except SampleError:
            drawn = self._watch.stop() - seeded
            # With a draw, the error may be due to what was drawn.
            if not drawn:
                raise
        else:
            drawn = self._watch.stop() - seeded
            if not drawn:
                return samples
        self._repeated_batches += 1
        # A dataset that draws in one sample of thousands is faster if a few batches are read twice.
        if 4 * self._repeated_batches > self._watched_batches:
            self.seeded_generators = seeded | drawn
        return self._samples.read_seeded(draw, self._batched_from, GLOBAL_GENERATORS)

    def _transform_rest(
        self, draw: Draw, samples: Sequence[Sample | Unreadable]
    ) -> tuple[Any, Sequence[Sample | Unreadable]]:
        """Apply the transforms of whole batches at the end of the pipeline.

        Returns:
            The stacked inputs, and the samples before. Without such transforms, or if the samples
            cannot be stacked, None and the samples, transformed one by one.
        """
        keys = None
        for position in range(self._batched_from, len(self.pipeline.transforms)):
            keys = keys or self._samples.make_keys(draw)
            stacked = self._transform_stacked(samples, keys, position)
            if stacked is not None:
                return stacked, samples
            samples = [
                self._samples.transform_one(draw, sample, at, keys.select(at), position)
                for at, sample in enumerate(samples)
            ]
        return None, samples

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
        return map_tensors(batch, Tensor.contiguous)


def is_reading_here(frame: FrameType | None) -> bool:
    """Return whether code at `frame` was called to read a batch in this process."""
    while frame is not None and frame.f_code is not SampleReader.__getitem__.__code__:
        frame = frame.f_back
    return frame is not None


def _is_gathered(dataset: Any) -> bool:
    """Return whether batches come from `TensorSamples` itself; a subclass with custom access may
    draw at random."""
    dataset_type = type(dataset)
    return (
        isinstance(dataset, TensorSamples)
        and dataset_type.__getitem__ is TensorSamples.__getitem__
        and dataset_type.__getitems__ is TensorSamples.__getitems__
    )


def _have_one_form(inputs: Sequence[Any]) -> bool:
    """Return whether all inputs are tensors of one shape and type."""
    forms = {(value.shape, value.dtype) if isinstance(value, Tensor) else None for value in inputs}
    return len(forms) == 1 and None not in forms


def _advise_size(error: Exception, dataset: Any, where: str) -> Exception:
    """Return the error, with advice for a dataset that resizes images if `size` is set."""
    keeps_sizes = hasattr(dataset, "size") and dataset.size is None
    if not isinstance(error, UnequalShapesError) or not keeps_sizes:
        return error
    return UnequalShapesError(error.difference, f"set {where}.size=..., or ")


def _describe_shape_error(split: str, indices: Sequence[int], error: Exception) -> str:
    prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return (
        f"DATA.{split.upper()}: samples {join_first(indices, MAX_LISTED)} do not form a batch: "
        f"{prefix}{error}"
    )
