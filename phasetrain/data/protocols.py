"""The interfaces that a dataset may implement; the rest of the package asks for nothing else.

Only `Samples` is required. Each of the others enables a feature when a dataset happens to have it:
no base class, no registration.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Samples(Protocol):
    """A map-style dataset: a length, and `(input, target)` for an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Indexed(Protocol):
    """An object with access by index, whether it has a length or not."""

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class BatchAccess(Protocol):
    """A dataset that reads several samples at once, the way torch's DataLoader asks for them."""

    def __getitems__(self, indices: list[int], /) -> Any:
        """Return the list of the samples at `indices`, equal to reading them one by one."""
        ...


@runtime_checkable
class HasClasses(Protocol):
    """A dataset with an attribute `classes`: their number, or as in torchvision their names."""

    classes: Any


@runtime_checkable
class HasClassNames(Protocol):
    """A dataset with an attribute `class_names`."""

    class_names: Any


@runtime_checkable
class HasSize(Protocol):
    """A dataset with an attribute `size`, to which it resizes images; None keeps their sizes."""

    size: Any


@runtime_checkable
class Described(Protocol):
    """A dataset that provides facts about itself."""

    def facts(self) -> Mapping[str, Any]:
        """Return facts that other parts may request by name.

        Keys, each omitted if it does not apply: `classes` (int), `class_names` (tuple of str),
        `input_shape` (tuple of int, `(C, H, W)` for images; only if all samples share it),
        `channels` (int).
        """
        ...


@runtime_checkable
class HasFieldKinds(Protocol):
    """A dataset that declares the kinds of the fields of its samples.

    Attributes:
        field_kinds: name of a field -> kind, or a list for samples that are tuples; see
            `DATA.*.fields`.
    """

    field_kinds: Any


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
class Measured(Protocol):
    """A dataset that knows the lengths of its samples without reading them."""

    def lengths(self) -> NDArray[np.int64]:
        """Return the length of each sample (tokens, frames, ...), int64 `(N,)`."""
        ...


@runtime_checkable
class Weighted(Protocol):
    """A dataset that provides a sampling weight for each sample."""

    def weights(self) -> NDArray[np.float64]:
        """Return a nonnegative weight for each sample, `(N,)`."""
        ...


@runtime_checkable
class Mixture(Protocol):
    """A dataset whose indices run through several source datasets, one after the other.

    Attributes:
        source_lengths: label of each source -> its number of samples.
    """

    source_lengths: Mapping[str, int]


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
class GrowingDataset(Protocol):
    """A dataset to which samples may be appended while a run uses it."""

    def continues(self, fingerprint: str) -> bool:
        """Return whether the dataset begins with the data that had this fingerprint."""
        ...
