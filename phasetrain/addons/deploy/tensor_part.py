"""The transforms at the end of a pipeline that can be part of an exported model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.data.transforms import BatchTransform, Keys
from phasetrain.errors import SHAPE_ERRORS

Transform = Callable[..., Any]


def split_tensor_part(transforms: Sequence[Transform]) -> tuple[list[Transform], list[Transform]]:
    """Return the transforms up to the last one that cannot be part of an exported model, and the
    others: those that compute on batches of tensors without random numbers."""
    before = list(transforms)
    inside: list[Transform] = []
    while before and _is_tensor_operation(before[-1]):
        inside.insert(0, before.pop())
    return before, inside


class TransformedModel(nn.Module):
    """A model behind transforms, for export.

    Args:
        transforms: from `split_tensor_part`.
        model: takes their result.
    """

    def __init__(self, transforms: Sequence[Transform], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._transforms = tuple(transforms)

    def forward(self, batch: Tensor) -> Any:
        """Return the output of the model for raw inputs, `(N, ...)`."""
        for transform in self._transforms:
            batch = transform(batch, _NO_KEYS)
        return self.model(batch)


class _DrawsError(Exception):
    """A transform has asked for random numbers."""


class _NoKeys(Keys):
    """Keys of a transform that must not draw."""

    def __init__(self) -> None:
        super().__init__([0])

    def fork(self, stream: int) -> Keys:
        raise _DrawsError

    def uniform(self, *shape: int) -> Any:
        raise _DrawsError

    def make_seeds(self) -> list[int]:
        raise _DrawsError


_NO_KEYS = _NoKeys()


def _is_tensor_operation(transform: Any) -> bool:
    """Return whether a transform computes on a batch without random numbers."""
    if not isinstance(transform, BatchTransform):
        return False
    try:
        transform(torch.zeros(1, 3, 256, 256), _NO_KEYS)
    except _DrawsError:
        return False
    except SHAPE_ERRORS:
        return True  # it takes inputs of another shape
    return True
