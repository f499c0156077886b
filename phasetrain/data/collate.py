"""How samples become a batch, where the data set does not give whole batches itself."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from phasetrain.registry import Registry

Collate = Callable[[Sequence[Any]], Any]
"""Makes of N samples, each a pair (input, target), one pair of batches with first dimension N."""

COLLATES: Registry[Collate] = Registry("collate function", "DATA.*.collate")


@COLLATES.register("stack")
def stack() -> Collate:
    """Return torch's `default_collate`: tensors of equal shape are stacked, numbers become a tensor."""
    return stacked


def stacked(samples: Sequence[Any]) -> Any:
    """Return the batch of samples `(input, target)`.

    Raises:
        ValueError: two inputs have different shapes; both are named.
    """
    first = samples[0][0]
    if isinstance(first, torch.Tensor):
        odd = next((i for i, sample in enumerate(samples) if sample[0].shape != first.shape), None)
        if odd is not None:
            raise ValueError(
                f"sample {odd} of the batch has shape {tuple(samples[odd][0].shape)}, the first has "
                f"{tuple(first.shape)}; bring all samples to one shape (a transform such as resize), or set another "
                "collate"
            )
    return default_collate(list(samples))


def form(value: Any) -> str:
    """Return in words what `stacked` needs to be equal in all samples: types, shapes and keys.

    Example:
        >>> form((torch.zeros(1, 8, 8), 3))
        '(float32 (1, 8, 8), int)'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {value.shape}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {form(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(form, value)) + ")"
    return type(value).__name__


def common_form(values: Iterable[Any]) -> str | None:
    """Return the form of most values, of equally frequent ones the earliest; None where there are no values."""
    counts = Counter(map(form, values))
    return max(counts, key=counts.__getitem__, default=None)
