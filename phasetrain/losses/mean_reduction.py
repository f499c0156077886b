"""What a mean of torch's losses is taken over, where that is not the samples."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

IGNORED = -100
"""Target that torch's cross entropy leaves out unless told otherwise."""

Count = Callable[[Tensor], float]
"""Returns for the targets of a micro-batch what its mean loss is divided by."""


def count_of(loss: nn.Module) -> Count | None:
    """Return what counts the targets that a loss takes its mean over; None where those are the
    samples.

    Torch's cross entropy leaves out targets of `ignore_index`, and with weights of classes divides
    by their sum.
    """
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return None
    weight = loss.weight
    ignored = loss.ignore_index
    if weight is None and ignored == IGNORED:
        return None

    def count(target: Tensor) -> float:
        if (
            target.is_floating_point()
        ):  # probabilities: torch divides by the number of samples and places
            return float(target.numel() // target.shape[1] if target.ndim > 1 else 1)
        counted = target[target != ignored]
        return float(
            len(counted) if weight is None else weight.cpu()[counted.cpu()].sum(dtype=torch.float64)
        )

    return count


def counts_otherwise(loss: nn.Module) -> bool:
    """Tell whether a part of a loss, not the loss itself, takes its mean over something else than
    samples."""
    return any(count_of(part) is not None for part in loss.modules() if part is not loss)
