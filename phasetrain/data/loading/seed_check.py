"""Detects a dataset or transform that ignores its seeds, before a run relies on it."""

import logging
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from phasetrain.config.nested import to_plain
from phasetrain.data.bad_samples import MissingValueError, SampleError, Unreadable
from phasetrain.data.datasets.forward import FIRST, ForwardDataset, reads_forward
from phasetrain.data.loading.reader import BatchReader, SampleReader
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import TooSmallError
from phasetrain.data.transforms.joint.kinds import FieldFormError
from phasetrain.errors import ConfigError
from phasetrain.proof.compare import is_equal
from phasetrain.runtime.machine import GLOBAL_GENERATORS, GeneratorWatch

log = logging.getLogger(__name__)

SAMPLES = 8
"""Number of samples, spread over the dataset, that are read for the check."""

NOTICED = (
    f"of samples that have changed by then it notices the first {FIRST}, and others only with a "
    "method fingerprint()"
)
"""What a resume notices of an iterable whose samples have changed."""

CHECKED_POSITIONS = 24
"""Number of samples of an iterable that are read after saved positions."""


def check_seeded(reader: SampleReader, name: str) -> None:
    """Read some samples twice with the same seeds, and the first one alone, and compare them.

    Built-in parts, which take their randomness from keys, are trusted; samples are only read if the
    dataset or a transform is foreign. The reader learns whether its samples need seeds, and whether
    it may read them by the dataset's `__getitems__`.

    Args:
        reader: the reader of the split.
        name: name of the dataset, for the message.

    Raises:
        ConfigError: a part uses a private generator, or the dataset caches random numbers; the
            error names the part.
    """
    if not reader.draws_at_random:
        return
    indices = _select_indices(reader)
    if isinstance(reader.dataset, ForwardDataset) and reader.dataset.is_iterable:
        check_position(reader.dataset, reader.selection.where)
    if _caches_draws(reader, indices):
        raise ConfigError(
            f"{name} keeps samples together with the random numbers that it has drawn for them, so "
            "a resumed run, which has kept nothing, would draw others; keep what was read before "
            "anything is drawn, or make the random part a transform; "
            f"{reader.selection.where}.exact=false accepts it for this run, and takes back the "
            "promise of an exact resume",
            code="config.impure_sample",
        )
    together = _read_samples(reader, indices)
    _warn_of_batches(reader, together[0])
    again = _read_samples(reader, indices)
    # Alone, because a part may depend on the samples read before in the same process.
    alone = _read_samples(reader, indices[:1])
    if _are_identical(together, again) and _are_identical(alone, together):
        _choose_way_of_reading(reader, indices, together)
        return
    culprit = _find_culprit(reader, name, indices)
    raise ConfigError(
        f"{culprit} returns different samples for the same seeds, so a resume could not be exact; "
        "it probably has its own generator. Let it draw from the global generators of torch, NumPy "
        "or Python, which are seeded before each sample, or make it a BatchTransform, which gets "
        f"keys; {reader.selection.where}.exact=false accepts it for this run, and takes back the "
        "promise of an exact resume",
        code="config.impure_sample",
    )


def _warn_of_batches(reader: SampleReader, sample: Any) -> None:
    """Warn if the items of a list or an iterable look like batches: they are taken for samples."""
    dataset = getattr(reader.dataset, "dataset", reader.dataset)
    is_plain = isinstance(dataset, list | tuple) or reads_forward(dataset)
    if not is_plain or isinstance(sample, Unreadable):
        return
    tensors = [field for field in sample if isinstance(field, torch.Tensor)]
    if len(tensors) == 2 and tensors[0].ndim > 1 and tensors[0].shape[:1] == tensors[1].shape[:1]:
        log.warning(
            "%s: input and target of each sample have the same first dimension, %d, like a batch; "
            "if they are batches, yield single samples instead, which are batched here",
            reader.selection.where,
            len(tensors[0]),
        )


def check_position(dataset: ForwardDataset, where: str) -> None:
    """Say how a resume reaches its position in an iterable, and do not use positions of a dataset
    that do not restore its samples.

    Args:
        dataset: the iterable.
        where: the split in messages, such as `DATA.TRAIN`.
    """
    # Stages have readers of their own for the same dataset.
    if dataset.is_checked:
        return
    dataset.is_checked = True
    type_name = type(dataset.dataset).__name__
    if not dataset.saves_position:
        log.info(
            "%s: %s is read forward; a resume is exact, and reads and drops the samples before its "
            "position; with state_dict and load_state_dict it would begin there; %s",
            where,
            type_name,
            NOTICED,
        )
        return
    if _restores_position(dataset):
        log.info(
            "%s: %s is read forward; a resume begins at its saved position; %s",
            where,
            type_name,
            NOTICED,
        )
        return
    dataset.ignore_positions()
    log.warning(
        "%s: the state_dict of %s does not restore its samples, perhaps because a shuffle buffer "
        "is not part of it; it is not used: a resume is exact, and reads and drops the samples "
        "before its position; %s",
        where,
        type_name,
        NOTICED,
    )


def _restores_position(dataset: ForwardDataset) -> bool:
    """Return whether an iteration continues at saved positions with the same samples."""
    try:
        expected = [dataset[index] for index in range(CHECKED_POSITIONS)]
        for begin in (1, CHECKED_POSITIONS // 2):
            for index in range(begin):
                dataset[index]
            saved = dataset.save_position()
            if saved is None:
                return False
            # A copy, because the dataset may change what it has returned.
            dataset.load_position(pickle.loads(pickle.dumps(saved)))
            resumed = [dataset[index] for index in range(begin, CHECKED_POSITIONS)]
            if not is_identical(expected[begin:], resumed):
                return False
    except Exception as error:
        # A foreign state may fail in any way.
        log.debug("a position cannot be restored", exc_info=error)
        return False
    return True


def _caches_draws(reader: SampleReader, indices: list[int]) -> bool:
    """Return whether the dataset draws random numbers for a sample at its first read only.

    Has to be called before anything else reads these samples; the first one was read for its
    target.
    """
    watch = GeneratorWatch()
    for index in indices[1:]:
        drawn = []
        for _ in range(2):
            watch.start()
            try:
                reader.dataset[index]
            except Exception as error:  # noqa: BLE001 - the reader reports it, or tolerates it
                log.debug("sample %d cannot be read: %s", index, error)
                break
            drawn.append(bool(watch.stop()))
        if drawn == [True, False]:
            return True
    return False


def _choose_way_of_reading(reader: SampleReader, indices: list[int], seeded: Sequence[Any]) -> None:
    """Set how the reader reads samples, given some that were read with seeds."""
    draw = _make_draw(reader, indices)
    watch = GeneratorWatch()
    watch.start()
    unseeded = reader.read_unseeded(draw)
    drawn = watch.stop()
    if drawn:
        unseeded = reader.read_samples(draw, drawn)
    # Not only what was drawn counts: a part may derive a generator from `torch.initial_seed()`.
    if not _are_identical(seeded, unseeded):
        reader.seeded_generators = GLOBAL_GENERATORS
        return
    # The reader finds out by itself whether it is faster to seed every sample.
    if drawn:
        return
    if _returns_lists(reader.dataset, indices):
        reader.reads_lists = True
        reader.reads_lists = _are_identical(seeded, reader.read_unseeded(draw))


def _returns_lists(dataset: object, indices: list[int]) -> bool:
    """Return whether a dataset can read several samples at once."""
    read_samples = getattr(dataset, "__getitems__", None)
    if read_samples is None:
        return False
    try:
        samples = read_samples(indices)
    except Exception as error:  # noqa: BLE001 - the samples are then read one by one
        log.debug("__getitems__ is not used: %r", error)
        return False
    return isinstance(samples, list) and len(samples) == len(indices)


def read_first_targets(reader: BatchReader) -> Any:
    """Return the target of the first sample in use; of a mixture with batch sizes, label ->
    target.

    Raises:
        ConfigError, SampleError: see `read_first_target`.
    """
    return reader.join_targets([read_first_target(source) for source in reader.list_readers()])


def read_first_target(reader: SampleReader) -> Any:
    """Return the target of the first sample in use, or `...` if the sample cannot be read.

    Raises:
        ConfigError, SampleError: see `_read_first`.
    """
    if not reader.draws_at_random:
        index = _select_indices(reader)[0]
        return reader.selection.split_sample(reader.dataset[index], index)[1]
    first = _read_first(reader)
    if isinstance(first, Unreadable):
        return ...
    return first[1]


def read_first_shape(reader: SampleReader) -> tuple[int, ...] | None:
    """Return the shape of the transformed input of the first sample in use; None if it is no array,
    or cannot be read.

    Raises:
        ConfigError, SampleError: see `_read_first`.
    """
    first = _read_first(reader)
    if isinstance(first, Unreadable) or not isinstance(first[0], torch.Tensor | np.ndarray):
        return None
    return tuple(first[0].shape)


def _read_first(reader: SampleReader) -> Any:
    """Return the first sample in use.

    Raises:
        ConfigError: the config does not fit any of the checked samples: none has the fields that it
            names in the kinds that it declares, or, if `on_bad_sample` is to raise, all are smaller
            than a crop.
        SampleError: the sample cannot be read, and `on_bad_sample` is to raise.
    """
    try:
        (first,) = _read_samples(reader, _select_indices(reader)[:1])
    except SampleError as error:
        # A misspelt field is the likelier cause, and its message says more; else the error stands.
        _check_fields(reader)
        _check_sizes(reader, error)
        raise
    if isinstance(first, Unreadable):
        _check_fields(reader)
    return first


def _check_sizes(reader: SampleReader, error: SampleError) -> None:
    """Reject a crop for which the first sample and some others are too small: then its size is
    wrong, not the samples."""
    indices = _select_indices(reader)
    for index in indices[1:]:
        if not isinstance(error.__cause__, TooSmallError):
            return
        try:
            _read_samples(reader, [index])
        except SampleError as other:
            error = other
        else:
            return
    if isinstance(error.__cause__, TooSmallError):
        raise ConfigError(
            f"{reader.selection.where}.transforms: {error.__cause__} (the same for all "
            f"{len(indices)} samples that were checked)",
            code="config.misfit",
        ) from error


def _check_fields(reader: SampleReader) -> None:
    """Reject names and kinds of fields that fit none of some samples: then the names are wrong, not
    the samples."""
    wrong: list[Exception] = []
    for index in _select_indices(reader):
        try:
            sample = reader.dataset[index]
        except MissingValueError as error:
            wrong.append(error)
            continue
        except Exception as error:  # noqa: BLE001 - a bad sample is reported when it is read
            log.debug(
                "sample %d cannot be read, its fields are not checked: %s: %s",
                index,
                type(error).__name__,
                error,
            )
            continue
        try:
            reader.pipeline.check_fields(sample, reader.selection.where)
            reader.selection.split_sample(sample, index)
        except (ValueError, TypeError) as error:
            wrong.append(error)
        else:
            return
    if wrong:
        where = reader.selection.where
        message = str(wrong[0])
        if not message.startswith(where):
            separator = "." if isinstance(wrong[0], MissingValueError) else ": "
            message = f"{where}{separator}{message}"
        raise ConfigError(
            f"{message} (the same for all {len(wrong)} samples that were checked)",
            code="config.misfit"
            if isinstance(wrong[0], FieldFormError)
            else "config.missing_field",
        )


def _select_indices(reader: SampleReader) -> list[int]:
    """Return the indices of some samples in use, spread over all of them, including the first
    one."""
    length = len(reader.dataset) if reader.chosen is None else len(reader.chosen)
    if isinstance(reader.dataset, ForwardDataset):
        return list(range(min(SAMPLES, length)))  # all samples before the others would be read
    places = sorted({length * part // SAMPLES for part in range(SAMPLES)})
    if reader.chosen is None:
        return places
    chosen: list[int] = reader.chosen[places].tolist()
    return chosen


def is_identical(sample: Any, other: Any) -> bool:
    """Return whether two samples are equal bit for bit; a list equals a tuple."""
    return is_equal(to_plain(sample), to_plain(other))


def _read_samples(reader: SampleReader, indices: list[int]) -> Sequence[Any]:
    return reader.read_samples(_make_draw(reader, indices))


def _make_draw(reader: SampleReader, indices: list[int]) -> Draw:
    # Any fixed draw of the split will do: only samples with equal seeds are compared. An error
    # names the split.
    _, split, *_ = reader.selection.where.lower().split(".")
    return Draw(split, 0, 0, np.array(indices, dtype=np.int64))


def _are_identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two lists of samples are equal, ignoring unreadable samples and the longer
    tail."""
    pairs = zip(one, other, strict=False)
    return all(
        is_identical(*pair)
        for pair in pairs
        if not any(isinstance(sample, Unreadable) for sample in pair)
    )


def _find_culprit(reader: SampleReader, name: str, indices: list[int]) -> str:
    """Return the first part whose output differs between two readings."""
    transforms = reader.pipeline.transforms
    for count in range(len(transforms) + 1):
        # Growing parts of the pipeline: the first one that differs ends with the culprit.
        partial = reader.with_pipeline(reader.pipeline.replace_transforms(transforms[:count]))
        if not _are_identical(_read_samples(partial, indices), _read_samples(partial, indices)):
            if count:
                return f"transform {count - 1} ({type(transforms[count - 1]).__name__})"
            return f"dataset {name!r}"
    return f"dataset {name!r} or one of its transforms"
