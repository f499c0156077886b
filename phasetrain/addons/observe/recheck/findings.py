"""Differences between two computations of one update, as people and programs read them."""

from dataclasses import dataclass

import torch
from torch import Tensor

ORDER = (
    "samples",
    "batch content",
    "loss",
    "gradient",
    "gradient norm",
    "weights",
    "buffers",
    "optimizer state",
    "averaged weights",
    "metrics",
)
"""Components of an update, causes before their effects."""

MAX_LISTED = 2
"""Maximum number of tensors that a sentence names."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes per element: bits are compared as integers, in which NaN equals NaN."""


@dataclass(frozen=True)
class Difference:
    """A value of an update that was not computed again bit for bit.

    Attributes:
        component: one of `ORDER`, or the name of another part of the task.
        name: name of the tensor or value, such as `trunk.0.weight`.
        changed, entries: number of entries that differ, and of all; 0 if unknown.
    """

    component: str
    name: str
    changed: int = 0
    entries: int = 0

    def __str__(self) -> str:
        """Return the name, and how many of its entries differ."""
        if self.entries > 1:
            return f"{self.name} ({self.changed} of {self.entries} entries)"
        return self.name


def sort_findings(found: list[Difference]) -> list[Difference]:
    """Return differences with causes before their effects."""

    def rank(difference: Difference) -> int:
        component = difference.component
        return ORDER.index(component) if component in ORDER else len(ORDER)

    return sorted(found, key=rank)


def describe_findings(found: list[Difference]) -> str:
    """Return the components that differ, each with the first tensors.

    Args:
        found: result of `sort_findings`.
    """
    components = list(dict.fromkeys(difference.component for difference in found))
    texts = []
    for component in components:
        names = [str(difference) for difference in found if difference.component == component]
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        texts.append(f"{component}: {', '.join(names[:MAX_LISTED])}{more}")
    return "; ".join(texts)


def count_changed(one: Tensor, other: Tensor) -> int:
    """Return the number of entries of two tensors that are not equal bit for bit.

    Tensors of different shape or dtype differ in all entries.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(one.numel(), other.numel(), 1)
    return int((to_integers(one) != to_integers(other)).sum())


def to_integers(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU as integers with the same bits, `(N,)`."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.itemsize])


def sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the entries as integers modulo 2^64, 0-d; any single flipped bit changes
    it."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.itemsize]).sum(dtype=torch.int64)
