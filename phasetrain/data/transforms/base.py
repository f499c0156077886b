"""Random keys, transforms of whole batches, pipelines of them, and their registry
(`DATA.*.transforms`)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import isfunction
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from phasetrain.config.registry import Registry
from phasetrain.runtime.nested import map_tensors

TRANSFORMS: Registry[Callable[..., Any]] = Registry("transform", "DATA.*.transforms")

# SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195): the increment and the
# finaliser's factors.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
FACTOR_2 = np.uint64(0x94D049BB133111EB)
# Constants (digits of pi) that separate the hashes of streams and seeds from the hashes of draws.
FORK = np.uint64(0x243F6A8885A308D3)
SEEDS = np.uint64(0x13198A2E03707344)
UNIT = 2.0**-53  # 53 random bits make a float64 in [0, 1)
_NOTE = "transforms["
"""Beginning of the note of an error that a transform raised."""


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective hash of 64-bit words (the finaliser of SplitMix64), same shape."""
    words = (words ^ (words >> np.uint64(30))) * FACTOR_1
    words = (words ^ (words >> np.uint64(27))) * FACTOR_2
    return words ^ (words >> np.uint64(31))


class Keys:
    """Per-sample random keys: the randomness of each sample is a function of its key.

    Draws are counter-based: the numbers of a sample depend only on its key and the position within
    the drawn shape, never on other samples, on N, or on earlier draws. The same call therefore
    returns the same numbers; draw all you need in one call (`keys.integers(0, 9, 2)`) or `fork` for
    more.

    Args:
        values: one key per sample, uint64 `(N,)`; they are hashed before use, so consecutive
            numbers are fine.

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

    def select(self, at: int) -> "Keys":
        """Return the key of the sample at a position of the batch."""
        return Keys(self.values[at : at + 1])

    def fork(self, stream: int) -> "Keys":
        """Return the keys of an independent stream, such as one per position in a pipeline; `stream
        >= 0`."""
        return Keys(mix64(mix64(self.values ^ FORK) + _wrap_multiple(stream + 1)))

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Return uniform numbers in [0, 1), float64 `(N, *shape)`."""
        return (self._hash_counters(shape) >> np.uint64(11)).astype(np.float64) * UNIT

    def integers(self, low: int, high: int, *shape: int) -> NDArray[np.int64]:
        """Return uniform integers in [low, high), int64 `(N, *shape)`.

        Raises:
            ValueError: the range is empty, or wider than 2**40, for which 53 random bits are not
                uniform enough.
        """
        if not 0 < high - low <= 2**40:
            raise ValueError(
                f"integers in [{low}, {high}): the range must contain 1 to 2**40 numbers"
            )
        # By scaling instead of rejection: the number of draws of a sample must not depend on their
        # values.
        return np.floor(self.uniform(*shape) * (high - low)).astype(np.int64) + low

    def normal(self, *shape: int) -> NDArray[np.float64]:
        """Return standard normal numbers, float64 `(N, *shape)` (Box and Muller 1958,
        doi:10.1214/aoms/1177706645)."""
        pairs = self.uniform(2, *shape)
        # 1 - u is in (0, 1], so the logarithm is finite. Contiguous, because NumPy's vectorised and
        # scalar functions differ in the last bit, and the memory layout decides which one is used.
        radius = np.sqrt(-2.0 * np.log(np.ascontiguousarray(1.0 - pairs[:, 0])))
        return np.asarray(radius * np.cos(np.ascontiguousarray(2.0 * math.pi * pairs[:, 1])))

    def make_seeds(self) -> list[int]:
        """Return one seed in [0, 2**64) per sample, for code that draws from global generators."""
        return [int(word) for word in mix64(mix64(self.values ^ SEEDS) + GOLDEN)]

    def _hash_counters(self, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        # From 1, as in SplitMix64, which adds the increment before each output.
        counters = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * GOLDEN
        return mix64(mix64(self.values)[:, None] + counters).reshape(len(self), *shape)


def _wrap_multiple(count: int) -> np.uint64:
    """Return `count * GOLDEN` modulo 2**64 (a product of NumPy scalars would warn about the
    overflow)."""
    return np.uint64(count * int(GOLDEN) % 2**64)


class BatchTransform(ABC):
    """A transform of a whole batch: a pure function of the batch and its keys.

    Each sample must be transformed independently of the others: a batch of eight gives the same
    bits as eight batches of one. Never draw from a global generator. The last transform of a split
    may return a list of batches, several views of each sample.

    Example:
        >>> @TRANSFORMS.register("invert")
        ... class Invert(BatchTransform):
        ...     def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        ...         flip = torch.from_numpy(keys.uniform() < 0.5).view(-1, *[1] * (batch.ndim - 1))
        ...         return torch.where(flip, 1 - batch, batch)
    """

    @abstractmethod
    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the transformed batch `(N, ...)`, without changing `batch` in place."""


class TargetTransform(BatchTransform):
    """A transform that also makes the target of each sample, for self-supervised tasks.

    It belongs into the list of the split, not within another transform. Inference leaves it out.
    """

    @abstractmethod
    def make_targets(self, keys: Keys) -> Sequence[Any]:
        """Return the target of each sample, from the keys that `__call__` gets for it."""


class Pipeline:
    """The transforms of a split, in order.

    Args:
        transforms: each a `BatchTransform`, or any other callable, which gets one sample at a time
            and may draw from the global generators; the caller of `transform_sample` seeds them
            from the key of the sample.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]] = ()) -> None:
        self.transforms = tuple(transforms)

    @property
    def is_batched(self) -> bool:
        """Whether whole batches can be transformed: all transforms are BatchTransforms."""
        return all(isinstance(transform, BatchTransform) for transform in self.transforms)

    @property
    def takes_fields(self) -> bool:
        """Whether a sample is transformed before its input and target are selected."""
        return False

    def check_fields(self, sample: Any, where: str) -> None:
        """Reject a sample without the fields that the pipeline takes; this one takes any sample.

        Args:
            sample: a sample of the dataset.
            where: config path of the split, for messages.

        Raises:
            ValueError: the form of the sample is wrong.
        """

    @property
    def makes_targets(self) -> bool:
        """Whether a transform makes the targets."""
        return any(isinstance(transform, TargetTransform) for transform in self.transforms)

    def make_targets(self, keys: Keys) -> Sequence[Any]:
        """Return the targets that the last TargetTransform makes for the samples with these
        keys."""
        for position, transform in reversed([*enumerate(self.transforms)]):
            if isinstance(transform, TargetTransform):
                return transform.make_targets(keys.fork(position))
        raise ValueError("no transform makes targets")

    def replace_transforms(self, transforms: Sequence[Callable[..., Any]]) -> "Pipeline":
        """Return a pipeline with other transforms of the same samples."""
        return Pipeline(transforms)

    def find_batched_end(self) -> int:
        """Return the position from which on all transforms are BatchTransforms."""
        position = len(self.transforms)
        while position and isinstance(self.transforms[position - 1], BatchTransform):
            position -= 1
        return position

    def __call__(self, batch: Any, keys: Keys, begin: int = 0) -> Any:
        """Return the batch after the transforms from position `begin` on; the transform at position
        i gets `keys.fork(i)`.

        The result is a tensor, or a list of tensors if the last transform makes several views.

        Raises:
            TypeError: a transform is not a BatchTransform; use `transform_sample`.
        """
        for position, transform in enumerate(self.transforms[begin:], begin):
            if not isinstance(transform, BatchTransform):
                raise TypeError(
                    f"transform {position} ({_class_name(transform)}) takes single samples, not "
                    "batches"
                )
            if not isinstance(batch, Tensor):
                raise TypeError(_describe_non_tensor(position, transform, batch))
            batch = transform(batch, keys.fork(position))
        return batch

    def transform_sample(
        self, sample: Any, key: Keys, begin: int = 0, end: int | None = None
    ) -> Any:
        """Return one sample after the transforms `begin` to `end - 1`, all by default;
        bit-identical to the same sample in a batch.

        Args:
            sample: the input of one sample, without a batch dimension.
            key: keys of one sample.
            begin: position of the first transform.
            end: position after the last transform; None: all the rest.

        Raises:
            TypeError: the input of a BatchTransform is not a tensor.
        """

        def apply(position: int, transform: Callable[..., Any], value: Any) -> Any:
            if not isinstance(transform, BatchTransform):
                return transform(value)
            if isinstance(value, Tensor):
                return map_tensors(transform(value[None], key.fork(position)), itemgetter(0))
            raise TypeError(_describe_non_tensor(position, transform, value))

        return self.apply_in_turn(apply, sample, begin, end)

    def apply_in_turn(
        self,
        apply: Callable[[int, Callable[..., Any], Any], Any],
        value: Any,
        begin: int,
        end: int | None,
    ) -> Any:
        """Return a value after the transforms `begin` to `end - 1`, each called by `apply(position,
        transform, value)`; an error gets the transform as a note, see `list_failed_transforms`."""
        for position, transform in enumerate(self.transforms[begin:end], begin):
            try:
                value = apply(position, transform, value)
            except Exception as error:
                error.add_note(f"{_NOTE}{position}] ({_class_name(transform)})")
                raise
        return value

    def shape_after(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of a transformed sample of `shape`; None if a transform is not a
        BatchTransform.

        With several views it is the shape of the first view.
        """
        if not self.is_batched:
            return None
        transformed = self(torch.zeros(1, *shape), Keys([0]))
        return tuple((transformed[0] if isinstance(transformed, list) else transformed).shape[1:])


def list_failed_transforms(error: Exception) -> list[str]:
    """Return the transform that raised an error, such as `transforms[1] (Invert)`, and those that
    it is in; empty if the error does not come from a transform."""
    return [note for note in vars(error).get("__notes__", ()) if note.startswith(_NOTE)]


class TooSmallError(ValueError):
    """An image is too small for a transform."""


def check_images(batch: Tensor, transform: BatchTransform) -> None:
    """Raise ValueError unless `batch` is a batch of images `(N, C, H, W)`."""
    if batch.ndim != 4:
        raise ValueError(
            f"{_class_name(transform)} takes images (N, C, H, W), not a batch of shape "
            f"{tuple(batch.shape)}"
        )


def _describe_non_tensor(position: int, transform: Callable[..., Any], sample: Any) -> str:
    return (
        f"transform {position} ({_class_name(transform)}) takes a tensor, not "
        f"{type(sample).__name__}; insert a transform that makes tensors before it, and move "
        "transforms after multi_crop into the groups of multi_crop"
    )


def _class_name(transform: Callable[..., Any]) -> str:
    """Return the name of the class of a transform, or of the function."""
    return transform.__name__ if isfunction(transform) else type(transform).__name__
