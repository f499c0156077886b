"""Finds a data set or transform that ignores the seeds it is given, before a run relies on it."""

import logging
from typing import Any

import numpy as np
import torch

from phasetrain.data.bad_samples import MissingValueError, SampleError, Unreadable
from phasetrain.data.loading.reader import Reader
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Pipeline
from phasetrain.errors import ConfigError

log = logging.getLogger(__name__)

SAMPLES = 8
"""How many samples, spread over the data set, are read to find a part that ignores its seeds."""


def check_pure(reader: Reader, name: str) -> None:
    """Read some samples twice with the same seeds, and the first one alone, and see that they stay
    the same.

    Parts of our own, which take their randomness from keys, are trusted; a sample is read only
    where a data set or transform of another kind takes part.

    Args:
        reader: the split's reader.
        name: the data set's name, for the message.

    Raises:
        ConfigError: a part draws from a generator of its own; the part is named.
    """
    if not reader.draws_at_random:
        return
    indices = _spread(reader)
    together = _inputs(reader, indices)
    again = _inputs(reader, indices)
    alone = _inputs(reader, indices[:1])
    if _alike(together, again) and _alike(alone, together):
        return
    culprit = _culprit(reader, name, indices)
    raise ConfigError(
        f"{culprit} gives other samples each time although the seeds are the same, so no resume could be exact: it "
        "draws from a generator of its own. Let it draw from the global generators of torch, NumPy or Python, which "
        "are seeded before each sample, or make it a BatchTransform, which gets keys"
    )


def first_target(reader: Reader) -> Any:
    """Return the target of the first sample that takes part; `...` stands for that of one that
    cannot be read.

    Raises:
        ConfigError: no sample that is looked at has the values that the config names as its input
            and target.
        SampleError: the sample cannot be read, and `on_bad_sample` is to raise.
    """
    index = _spread(reader)[0]
    if not reader.draws_at_random:
        return reader.selection.pair(reader.dataset[index], index)[1]
    try:
        (first,) = _inputs(reader, [index])
    except SampleError:
        _check_names(reader)
        raise
    if isinstance(first, Unreadable):
        _check_names(reader)
        return ...
    return first[1]


def _check_names(reader: Reader) -> None:
    """Refuse names of values that none of some samples has: the names are wrong then, and not the
    samples."""
    wrong: list[Exception] = []
    for index in _spread(reader):
        try:
            sample = reader.dataset[index]
        except MissingValueError as error:
            wrong.append(error)
            continue
        except Exception as error:  # noqa: BLE001 - a bad sample says nothing of names, and is told where it is read
            log.debug(
                "sample %d, in which names were looked for: %s: %s",
                index,
                type(error).__name__,
                error,
            )
            continue
        try:
            reader.selection.pair(sample, index)
        except (ValueError, TypeError) as error:
            wrong.append(error)
        else:
            return
    if wrong:
        where = reader.selection.where
        told = str(wrong[0])
        if told.startswith(where):
            told = told
        else:
            told = f"{where}{'.' if isinstance(wrong[0], MissingValueError) else ': '}{told}"
        raise ConfigError(f"{told} (so with each of {len(wrong)} that were looked at)")


def _spread(reader: Reader) -> list[int]:
    """Return the indices of some samples that take part, spread over all of them, the first one
    among them."""
    length = len(reader.dataset) if reader.chosen is None else len(reader.chosen)
    places = sorted({length * part // SAMPLES for part in range(SAMPLES)})
    if reader.chosen is None:
        return places
    chosen: list[int] = reader.chosen[places].tolist()
    return chosen


def same(one: Any, other: Any) -> bool:
    """Tell whether two samples are equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic) and isinstance(other, np.ndarray | np.generic):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()  # equal where both are not a number, too
    return bool(one == other)


def _inputs(reader: Reader, indices: list[int]) -> list[Any]:
    draw = Draw("train", 0, 0, np.array(indices, dtype=np.int64))
    return reader.samples(draw)


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two readings are equal as far as both go and their samples could be read."""
    pairs = zip(one, other, strict=False)
    return all(
        same(*pair) for pair in pairs if not any(isinstance(sample, Unreadable) for sample in pair)
    )


def _culprit(reader: Reader, name: str, indices: list[int]) -> str:
    """Return which part it is: the first whose output differs between two readings."""
    transforms = reader.pipeline.transforms
    for count in range(len(transforms) + 1):
        partial = reader.with_pipeline(Pipeline(transforms[:count]))
        if not _alike(_inputs(partial, indices), _inputs(partial, indices)):
            if count:
                return f"transform {count - 1} ({type(transforms[count - 1]).__name__})"
            return f"data set {name!r}"
    return f"data set {name!r} or one of its transforms"


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel():
        return flat.view(torch.uint8).numpy().tobytes()
    return b""
