"""The rows of some samples in a nested batch."""

from typing import Any

from torch import Tensor

from phasetrain.runtime.nested import list_tensors, map_tensors


class NoRowsError(ValueError):
    """A tensor has no row for each sample."""


def take_rows(value: Any, rows: slice, samples: int, name: str = "a tensor") -> Any:
    """Return the rows of some samples of a batch.

    Args:
        value: tensors `(N, ...)`, nested in any form, and lists with an entry for each sample, such
            as the boxes of each image.
        rows: the samples.
        samples: number of samples of the batch.
        name: name of the value, for messages.

    Raises:
        NoRowsError: a tensor does not have one row per sample.
    """
    if isinstance(value, dict):
        return {
            key: take_rows(item, rows, samples, f"{name}[{key!r}]") for key, item in value.items()
        }
    if type(value) in (list, tuple):
        if _has_entry_per_sample(value, samples):
            return value[rows]
        return type(value)(
            take_rows(item, rows, samples, f"{name}[{number}]") for number, item in enumerate(value)
        )

    def take(tensor: Tensor) -> Tensor:
        if not _has_rows(tensor, samples):
            shape = f"has shape {tuple(tensor.shape)}" if tensor.ndim else "is one number"
            raise NoRowsError(f"{name} {shape}, without a row for each of the {samples} samples")
        return tensor[rows]

    return map_tensors(value, take)


def _has_entry_per_sample(value: list[Any] | tuple[Any, ...], samples: int) -> bool:
    """Return whether entries belong to samples: with rows for all samples, they are outputs of as
    many heads."""
    if len(value) != samples:
        return False
    tensors = list_tensors(value)
    return not tensors or not all(_has_rows(tensor, samples) for tensor in tensors)


def _has_rows(tensor: Tensor, samples: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == samples
