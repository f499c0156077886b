"""Reads and transforms single samples, as a pure function of seed, draw and place in the draw."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from phasetrain.data.bad_samples import OnBadSample, SampleError, Unreadable
from phasetrain.data.loading.collate import describe_form
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Keys, Pipeline, list_failed_transforms, mix64
from phasetrain.data.transforms.joint.kinds import FieldFormError
from phasetrain.engine.plan import TRAIN
from phasetrain.runtime.machine import reseed_all, seed_of
from phasetrain.runtime.storage import RemoteError

log = logging.getLogger(__name__)

Sample = tuple[Any, Any]
"""Transformed input, and target."""


class SingleSamples:
    """The samples of a draw, each read and transformed by itself.

    Args:
        dataset: the samples.
        pipeline: transforms of the input.
        selection: which values of a sample are input and target.
        seed: seed of the run.
        on_bad_sample: policy for a sample that cannot be read: an error, or a placeholder.
    """

    def __init__(
        self,
        dataset: Any,
        pipeline: Pipeline,
        selection: FieldSelection,
        seed: int,
        on_bad_sample: OnBadSample,
    ) -> None:
        self._dataset = dataset
        self._pipeline = pipeline
        self._makes_targets = pipeline.makes_targets
        self._selection = selection
        self._seed = seed
        self._on_bad_sample = on_bad_sample

    def make_keys(self, draw: Draw) -> Keys:
        """Return the key material of each sample of a draw."""
        base = np.uint64(seed_of(self._seed, "sample", draw.split, draw.epoch))
        # Position and index both enter the key: a sample that is drawn twice in an epoch is
        # augmented differently each time, and neither the batch size nor the world size matters.
        # In tests, only the index counts: a metric changes with the weights, not with the order.
        positions = draw.ordinals if draw.split == TRAIN else draw.indices
        words = mix64(positions.astype(np.uint64) ^ base)
        return Keys(mix64(words ^ draw.indices.astype(np.uint64)))

    def read_seeded(
        self, draw: Draw, end: int, generators: Collection[str]
    ) -> Sequence[Sample | Unreadable]:
        """Return the samples after the first `end` transforms, with some global generators seeded
        for each.

        Raises:
            SampleError: one cannot be read, and `on_bad_sample` is to raise.
        """
        keys = self.make_keys(draw)
        samples = []
        for at, seed in enumerate(keys.make_seeds()):
            reseed_all(seed, generators)
            index = int(draw.indices[at])
            samples.append(self.read_sample(draw.split, index, keys.select(at), end))
        return samples

    def read_unseeded(
        self, draw: Draw, end: int, *, as_list: bool = False
    ) -> Sequence[Sample | Unreadable]:
        """Return the samples after the first `end` transforms, without seeding.

        Args:
            draw: the samples.
            end: number of transforms.
            as_list: read them with one call of the dataset's `__getitems__`.

        Raises:
            SampleError: see `read_seeded`.
        """
        # A batch with an error is read again one by one, to find out which sample it is. With a
        # dataset in which errors are expected, that would cost more than it gains.
        if as_list or self._on_bad_sample == "raise":
            try:
                return self._read_at_once(draw, end, as_list=as_list)
            except Exception as error:  # noqa: BLE001 - it comes again with the sample's number
                log.debug("DATA.%s: a batch cannot be read: %r", draw.split.upper(), error)
        keys = self.make_keys(draw)
        return [
            self.read_sample(draw.split, index, keys.select(at), end)
            for at, index in enumerate(draw.indices.tolist())
        ]

    def _read_at_once(self, draw: Draw, end: int, *, as_list: bool) -> Sequence[Sample]:
        """Return the samples of a draw after the first `end` transforms, with as few calls per
        sample as possible."""
        indices = draw.indices.tolist()
        if as_list:
            raw = self._dataset.__getitems__(indices)
        else:
            raw = [self._dataset[index] for index in indices]
        if self._pipeline.takes_fields:
            keys = self.make_keys(draw)
            raw = [
                self._pipeline.transform_sample(sample, keys.select(at), 0, end)
                for at, sample in enumerate(raw)
            ]
            end = 0
        samples = self._selection.split_samples(raw, indices)
        if self._makes_targets:
            targets = self._pipeline.make_targets(self.make_keys(draw))
            samples = [(value, target) for (value, _), target in zip(samples, targets, strict=True)]
        if end:
            keys = self.make_keys(draw)
            samples = [
                (self._pipeline.transform_sample(value, keys.select(at), 0, end), target)
                for at, (value, target) in enumerate(samples)
            ]
        inputs = [value for value, _ in samples]
        if set(map(type, inputs)) != {Tensor} or not all(map(Tensor.numel, inputs)):
            for value in inputs:
                _check_input(value)
        return samples

    def transform_one(
        self, draw: Draw, sample: Sample | Unreadable, at: int, key: Keys, position: int
    ) -> Sample | Unreadable:
        """Return the sample at a place of a draw after one more transform, see `read_seeded`."""
        if isinstance(sample, Unreadable):
            return sample
        value, target = sample
        try:
            value = self._pipeline.transform_sample(value, key, position, position + 1)
            return _check_input(value), target
        except Exception as error:  # noqa: BLE001 - raised again there unless it is tolerated
            return self._handle_bad_sample(draw.split, int(draw.indices[at]), error)

    def read_sample(self, split: str, index: int, key: Keys, end: int) -> Sample | Unreadable:
        """Return a sample after the first `end` transforms, see `read_seeded`."""
        try:
            sample = self._dataset[index]
            if self._pipeline.takes_fields:
                sample = self._pipeline.transform_sample(sample, key, 0, end)
                value, target = self._selection.split_sample(sample, index)
                return _check_input(value), target
            value, target = self._selection.split_sample(sample, index)
            if self._makes_targets:
                target = self._pipeline.make_targets(key)[0]
            return _check_input(self._pipeline.transform_sample(value, key, 0, end)), target
        except Exception as error:  # noqa: BLE001 - raised again there unless it is tolerated
            return self._handle_bad_sample(split, index, error)

    def _handle_bad_sample(self, split: str, index: int, error: Exception) -> Unreadable:
        """Return the placeholder of a bad sample.

        Raises:
            SampleError: `on_bad_sample` is to raise.
        """
        # Samples that a lost connection hides are not bad: another attempt will read them.
        if self._on_bad_sample != "raise" and not isinstance(error, RemoteError):
            return Unreadable.from_error(error)
        where = f"DATA.{split.upper()}"
        reason = f"cannot be read: {type(error).__name__}: {error}; repair it"
        if transforms := list_failed_transforms(error):
            reason = (
                f"cannot be transformed: {type(error).__name__}: {error}, in "
                f"{' of '.join(transforms)}; repair the sample or the transform"
            )
        # Fields that do not fit a transform are the same in all samples.
        if not isinstance(error, FieldFormError):
            reason += f", or go on without such samples: {where}.on_bad_sample=drop"
        raise SampleError(
            f"{where}: sample {index} {reason}", code="data.unreadable_sample"
        ) from error


def _check_input(value: Any) -> Any:
    if value is None:
        raise ValueError("its input is None; the dataset or a transform returns nothing")
    if (isinstance(value, Tensor) and value.numel() == 0) or (
        isinstance(value, np.ndarray) and value.size == 0
    ):
        raise ValueError(f"its input is empty: {describe_form(value)}")
    return value
