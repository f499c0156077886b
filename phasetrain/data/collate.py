"""How samples become a batch, where the data set does not give whole batches itself."""

from collections.abc import Callable, Sequence
from typing import Any

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
