"""The interfaces that a dataset may implement; the rest of the package asks for nothing else.

Only `Samples` is required. Each of the others enables a feature when a dataset happens to have it:
no base class, no registration. So do these attributes and methods:

    classes, class_names   number of classes, or their names, of a dataset without `facts`
    field_kinds            kinds of the fields of a sample by name, or a list for samples that are
                           tuples; see `DATA.*.fields`
    size                   size to which the dataset resizes images; None keeps their sizes
    source_lengths         label of each source -> its number of samples, if the indices run through
                           several sources, one after the other
    build_sources          makes reader and order of a split, for a dataset that composes batches
                           itself; see `phasetrain.tasks.build.loading_builder.SourceBuilder`
    lengths()              length of each sample (tokens, frames, ...), int64 `(N,)`, without
                           reading them
    weights()              nonnegative sampling weight of each sample, `(N,)`
    __getitems__(indices)  list of several samples, equal to reading them one by one, the way
                           torch's DataLoader asks for them
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Samples(Protocol):
    """A map-style dataset: a length, and `(input, target)` for an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Described(Protocol):
    """A dataset that provides facts about itself."""

    def facts(self) -> Mapping[str, Any]:
        """Return facts that other parts may request by name.

        Keys, each omitted if it does not apply: `classes` (int), `class_names` (tuple of str),
        `input_shape` (tuple of int, `(C, H, W)` for images; only if all samples share it),
        `channels` (int), `input_columns` (tuple of str: the names of the entries of an input that
        is a row of a table).

        With a parameter `indices`, the method gets the indices of the samples in use, int64 `(N,)`:
        those of `subset`, otherwise all.
        """
        ...


def takes_indices(dataset: Described) -> bool:
    """Return whether the facts of a dataset are those of given samples."""
    return "indices" in signature(dataset.facts).parameters


def read_facts(dataset: object, chosen: NDArray[np.int64] | None = None) -> Mapping[str, Any]:
    """Return the facts of a dataset; none if it is not `Described`.

    Args:
        dataset: the dataset.
        chosen: indices of the samples in use; None: all.
    """
    if not isinstance(dataset, Described):
        return {}
    facts: Callable[..., Mapping[str, Any]] = dataset.facts
    if isinstance(dataset, Sized) and takes_indices(dataset):
        return facts(indices=np.arange(len(dataset)) if chosen is None else chosen)
    return facts()


@runtime_checkable
class Fingerprinted(Protocol):
    """A dataset that can detect that its content has changed."""

    def fingerprint(self) -> str:
        """Return a hex digest of the content, or of ordered names and sizes if reading everything
        would take long."""
        ...


@runtime_checkable
class Labelled(Protocol):
    """A dataset that knows the classes of its samples without reading their inputs."""

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`."""
        ...


@runtime_checkable
class ShardedDataset(Protocol):
    """A dataset whose indices run through shards, one after the other.

    Attributes:
        shard_lengths: number of samples of each shard.
    """

    shard_lengths: tuple[int, ...]


@runtime_checkable
class WindowedDataset(Protocol):
    """A dataset divided into windows, such as hours or files; every epoch covers one window.

    Attributes:
        window_lengths: number of samples of each window, in index order.
    """

    window_lengths: Sequence[int]


@runtime_checkable
class Resumable(Protocol):
    """An iterable that can save where its iteration is, such as datasets of torchdata, streams of
    Hugging Face, and torchdata's StatefulDataLoader."""

    def state_dict(self) -> Any:
        """Return the position after the last sample or batch that the running iteration has
        yielded, or the beginning: tensors, numbers, text, lists and dicts."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Let the next iteration begin at a position."""
        ...


@runtime_checkable
class GrowingDataset(Protocol):
    """A dataset to which samples may be appended while a run uses it."""

    def continues(self, fingerprint: str) -> bool:
        """Return whether the dataset begins with the data that had this fingerprint."""
        ...
