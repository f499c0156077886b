"""A copy of tensors from before an update, to undo an update that is skipped."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class RestorePoint:
    """Copies tensors that a forward pass changes besides the weights: running statistics, queues.

    Args:
        lookup: returns these tensors; called each time, because a module may replace a tensor
            instead of writing to it.
    """

    def __init__(self, lookup: Callable[[], Sequence[Tensor]]) -> None:
        self._lookup = lookup
        self._copies: list[Tensor] = []

    def include(self, lookup: Callable[[], Sequence[Tensor]]) -> None:
        """Copy these tensors, too."""
        before = self._lookup
        self._lookup = lambda: [*before(), *lookup()]

    def save(self) -> None:
        """Copy the tensors as they are now."""
        now = [tensor.detach() for tensor in self._lookup()]
        # Queues may grow and modules may replace buffers; otherwise the memory of the copies is
        # reused.
        if [(t.shape, t.dtype) for t in now] != [(t.shape, t.dtype) for t in self._copies]:
            self._copies = [tensor.clone() for tensor in now]
        elif now:
            torch._foreach_copy_(self._copies, now)

    def restore(self) -> None:
        """Write the copies back."""
        for now, copy in self._pairs():
            if now.shape == copy.shape:
                now.copy_(copy)
            else:
                # The module has resized the tensor; other objects refer to it, so it keeps its
                # identity.
                now.data = copy.clone()

    def restore_where(self, flag: Tensor) -> None:
        """Write the copies back if `flag` is 1, without waiting for the device.

        Tensors whose shape has changed are left alone: a shape cannot depend on a device value.
        """
        for now, copy in self._pairs():
            if now.shape == copy.shape:
                # `where` on the device instead of an `if` on the host, which would have to read the
                # flag.
                now.copy_(torch.where(flag.to(now.device) != 0, copy, now))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        # A parameter may be among them, and autograd forbids writing to a leaf in place.
        now = [tensor.detach() if tensor.requires_grad else tensor for tensor in self._lookup()]
        return list(zip(now, self._copies, strict=False))
