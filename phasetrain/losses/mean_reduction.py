"""Targets that a loss ignores, and the denominator of a loss of torch whose mean is not taken over
samples."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from phasetrain.engine.batch import IGNORED
from phasetrain.errors import ConfigError
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.losses.weighted_sum import WeightedSum

Count = Callable[[Tensor], float]
"""Maps the targets of a micro-batch to the denominator of its mean loss."""


def find_ignore_index(losses: Iterable[nn.Module], target: str | int | None = None) -> int | None:
    """Return the class of targets that losses ignore; None if they ignore none, or different ones.

    A loss declares it by an attribute `ignore_index`, as torch's losses do, or contains a loss that
    does.

    Args:
        losses: the loss of each stage.
        target: the entry of the targets in question; None: all of them.
    """
    values = set[int]()
    for loss in losses:
        terms = loss.select_target(target) if isinstance(loss, WeightedSum) else [loss]
        for part in (part for term in terms for part in term.modules()):
            ignore_index = getattr(part, "ignore_index", None)
            if isinstance(ignore_index, int):
                values.add(ignore_index)
            elif isinstance(part, CrossEntropy):
                values.add(IGNORED)
    if len(values) == 1:
        return values.pop()
    return None


def find_target_counter(loss: nn.Module) -> Count | None:
    """Return the function that counts the targets a loss averages over; None if it averages over
    samples.

    Torch's cross entropy skips targets equal to `ignore_index`, and divides by the sum of the class
    weights if it has any.
    """
    if isinstance(loss, CrossEntropy):
        if loss.ignore_index is None or loss.per_sample:
            return None
        return _make_counter(None, loss.ignore_index)
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return None
    weight = loss.weight
    ignored = loss.ignore_index
    if weight is None and ignored == IGNORED:
        return None
    return _make_counter(weight, ignored)


def _make_counter(weight: Tensor | None, ignored: int) -> Count:
    """Return the function that counts targets, by their weights if there are any."""

    def count_targets(target: Tensor) -> float:
        # Targets that are probabilities: torch divides by the number of samples and positions.
        if target.is_floating_point():
            return float(target.numel() // target.shape[1] if target.ndim > 1 else 1)
        counted = target[target != ignored]
        if weight is None:
            return float(len(counted))
        if counted.numel() and int(counted.max()) >= len(weight):
            raise ConfigError(
                f"LOSS.weight: it has {len(weight)} entries, and there is a target of class "
                f"{int(counted.max())}; give one weight for each class",
                code="loss.class_weights",
            )
        # float64, because the denominators of all micro-batches of an update are summed.
        return float(weight.cpu()[counted.cpu()].sum(dtype=torch.float64))

    return count_targets


def has_nested_target_counter(loss: nn.Module) -> bool:
    """Return whether a submodule of a loss averages over something else than samples."""
    return any(find_target_counter(part) is not None for part in loss.modules() if part is not loss)
