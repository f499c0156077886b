"""Keys of randomness, transforms of whole batches, pipelines of them, and their registry
(`DATA.*.transforms`)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from phasetrain.config.registry import Registry
from phasetrain.engine.batch import mapped

TRANSFORMS: Registry[Callable[..., Any]] = Registry("transform", "DATA.*.transforms")

# SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195): the increment and the
# finaliser's factors.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
FACTOR_2 = np.uint64(0x94D049BB133111EB)
# Set streams and seeds apart from draws (digits of pi).
FORK = np.uint64(0x243F6A8885A308D3)
SEEDS = np.uint64(0x13198A2E03707344)
UNIT = 2.0**-53  # 53 random bits make a float64 in [0, 1)


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective hash of 64-bit words (the finaliser of SplitMix64), same shape."""
    words = (words ^ (words >> np.uint64(30))) * FACTOR_1
    words = (words ^ (words >> np.uint64(27))) * FACTOR_2
    return words ^ (words >> np.uint64(31))


class Keys:
    """Key material of N samples: what the randomness of their inputs is a function of.

    Draws are counter-based: a sample's numbers depend on its own key and the position within the
    drawn shape alone, never on its neighbours, on N, or on what was drawn before. The same call
    therefore returns the same numbers; draw all that is needed in one call
    (`keys.integers(0, 9, 2)`) or `fork` for more.

    Args:
        values: one key per sample, uint64 `(N,)`; they may be consecutive numbers, as they are
            hashed before use.

    Example:
        >>> keys = Keys(np.arange(4, dtype=np.uint64))
        >>> left, right = keys.fork(0).uniform(), keys.fork(1).uniform()
    """

    def __init__(self, values: ArrayLike) -> None:
        self.values = np.ascontiguousarray(values, dtype=np.uint64)
        if self.values.ndim != 1:
            raise ValueError(f"keys have shape (N,), not {self.values.shape}")

    def __len__(self) -> int:
        return len(self.values)

    def fork(self, stream: int) -> "Keys":
        """Return the keys of an independent stream, such as one per position in a pipeline;
        `stream >= 0`."""
        return Keys(mix64(mix64(self.values ^ FORK) + _multiple(stream + 1)))

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Return uniform numbers in [0, 1), float64 `(N, *shape)`."""
        return (self._words(shape) >> np.uint64(11)).astype(np.float64) * UNIT

    def integers(self, low: int, high: int, *shape: int) -> NDArray[np.int64]:
        """Return uniform integers in [low, high), int64 `(N, *shape)`.

        Raises:
            ValueError: an empty range, or one too wide for 53 random bits to be fair to all of it
                (2**40).
        """
        if not 0 < high - low <= 2**40:
            raise ValueError(
                f"integers in [{low}, {high}): the range must hold from 1 to 2**40 numbers"
            )
        return np.floor(self.uniform(*shape) * (high - low)).astype(np.int64) + low

    def normal(self, *shape: int) -> NDArray[np.float64]:
        """Return standard normal numbers, float64 `(N, *shape)` (Box and Muller 1958,
        doi:10.1214/aoms/1177706645)."""
        pairs = self.uniform(2, *shape)
        radius = np.sqrt(
            -2.0 * np.log(np.ascontiguousarray(1.0 - pairs[:, 0]))
        )  # 1 - u lies in (0, 1]
        return np.asarray(radius * np.cos(np.ascontiguousarray(2.0 * math.pi * pairs[:, 1])))

    def seeds(self) -> list[int]:
        """Return one seed in [0, 2**64) per sample, for code that draws from global generators."""
        return [int(word) for word in mix64(mix64(self.values ^ SEEDS) + GOLDEN)]

    def _words(self, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        counters = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * GOLDEN
        return mix64(mix64(self.values)[:, None] + counters).reshape(len(self), *shape)


def _multiple(count: int) -> np.uint64:
    """Return `count * GOLDEN` modulo 2**64 (a product of NumPy scalars would warn of the
    overflow)."""
    return np.uint64(count * int(GOLDEN) % 2**64)


class BatchTransform(ABC):
    """A transform of a whole batch: a pure function of the batch and its keys.

    What it makes of a sample must not depend on the other samples: a batch of eight gives the same
    bits as eight batches of one. It never draws from a global generator. The last one of a split
    may return a list of batches, several views of each sample.

    Example:
        >>> @TRANSFORMS.register("invert")
        ... class Invert(BatchTransform):
        ...     def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        ...         chosen = torch.from_numpy(keys.uniform() < 0.5).view(-1, *[1] * (batch.ndim - 1))
        ...         return torch.where(chosen, 1 - batch, batch)
    """

    @abstractmethod
    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the transformed batch `(N, ...)` of `batch` `(N, ...)`, without changing `batch`
        in place."""


class Pipeline:
    """The transforms of a split, in order.

    Args:
        transforms: each a `BatchTransform`, or any other callable, which gets one sample at a time
            and may draw from the global generators; whoever calls `one` has seeded them from the
            sample's key.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]] = ()) -> None:
        self.transforms = tuple(transforms)

    @property
    def batched(self) -> bool:
        """Whether whole batches can go through: all transforms are BatchTransforms."""
        return all(isinstance(transform, BatchTransform) for transform in self.transforms)

    def __call__(self, batch: Any, keys: Keys) -> Any:
        """Return the transformed batch; the transform at position i gets `keys.fork(i)`.

        It is a tensor, or a list of them where the last transform makes several views.

        Raises:
            TypeError: a transform is not a BatchTransform; use `one` for each sample.
        """
        for position, transform in enumerate(self.transforms):
            if not isinstance(transform, BatchTransform):
                raise TypeError(
                    f"transform {position} ({_name(transform)}) takes single samples, not batches"
                )
            if not isinstance(batch, Tensor):
                raise TypeError(_no_tensor(position, transform, batch))
            batch = transform(batch, keys.fork(position))
        return batch

    def one(self, sample: Any, key: Keys) -> Any:
        """Return one transformed sample, bit for bit what it would be as part of a batch.

        Args:
            sample: the input of one sample, without a batch dimension.
            key: keys of one sample.

        Raises:
            TypeError: a BatchTransform gets what is not a tensor.
        """
        for position, transform in enumerate(self.transforms):
            if not isinstance(transform, BatchTransform):
                sample = transform(sample)
            elif isinstance(sample, Tensor):
                sample = mapped(transform(sample[None], key.fork(position)), itemgetter(0))
            else:
                raise TypeError(_no_tensor(position, transform, sample))
        return sample

    def shape_after(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of a transformed sample of `shape`; None when a transform is not a
        BatchTransform.

        Where the last one makes several views it is that of the first view.
        """
        if not self.batched:
            return None
        found = self(torch.zeros(1, *shape), Keys([0]))
        return tuple((found[0] if isinstance(found, list) else found).shape[1:])


def check_images(batch: Tensor, transform: BatchTransform) -> None:
    """Raise ValueError unless `batch` is a batch of images `(N, C, H, W)`."""
    if batch.ndim != 4:
        raise ValueError(
            f"{_name(transform)} takes images (N, C, H, W), not a batch of shape {tuple(batch.shape)}"
        )


def _no_tensor(position: int, transform: Callable[..., Any], sample: Any) -> str:
    return (
        f"transform {position} ({_name(transform)}) takes a tensor, not {type(sample).__name__}; put one in front that "
        "makes a tensor of the sample; what comes after multi_crop belongs into the transforms of its views"
    )


def _name(transform: Callable[..., Any]) -> str:
    return type(transform).__name__
