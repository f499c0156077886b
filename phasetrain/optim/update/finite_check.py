"""Checks tensors for infinities and NaNs in as few kernels as torch allows."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


class FiniteCheck:
    """Looks for entries that are not finite.

    The kernel is the one with which `torch.amp.GradScaler` unscales, here by a factor of 1. It is
    private to torch: if it is missing or rejects its input (mixed dtypes or devices, sparse
    gradients), the check falls back to the next method and stays with it.

    Args:
        device: device of most of the tensors to come.
        any_rank: replaces a flag by its maximum over all ranks, if each rank holds other tensors.
    """

    def __init__(
        self, device: torch.device, any_rank: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._any_rank = any_rank
        self._flag = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._method: Callable[[list[Tensor]], object] = partial(
            _mark_nonfinite, flag=self._flag, one=self._one
        )
        # From fast to general: mixed devices and dtypes first, then sparse, complex and expanded
        # tensors, which only the norm accepts.
        self._fallbacks = [self._mark_by_dtype, self._mark_by_norm]

    def mark(self, tensors: list[Tensor], *, everywhere: bool = False) -> Tensor:
        """Return a flag, float32 and 0-d, that is 1 if an entry of `tensors` is not finite.

        It is the same tensor each time and stays 1 until `reset`.

        Args:
            tensors: tensors to check.
            everywhere: combine the flags of all ranks; all of them must call this.
        """
        try:
            self._method(tensors)
        except (AttributeError, RuntimeError):
            if not self._fallbacks:
                raise
            # Kept for good: the kinds of gradients of a run do not change, and a failing call per
            # update would cost more than the check.
            self._method = self._fallbacks.pop(0)
            self.mark(tensors)
        # In place, and on every rank alike: whether to call a collective must not depend on the
        # flag.
        if everywhere and self._any_rank is not None:
            self._any_rank(self._flag)
        return self._flag

    def all_finite(self, tensors: list[Tensor]) -> bool:
        """Check every entry of `tensors` on all ranks; waits for the device."""
        if self.mark(tensors, everywhere=True).item():
            # Only after a hit: writing zero to a flag that is zero would cost a kernel per update.
            self.reset()
            return False
        return True

    def reset(self) -> None:
        """Lower the flag."""
        self._flag.zero_()

    def _mark_by_dtype(self, tensors: list[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for (device, _), group in groups.items():
            flag = torch.zeros((), device=device)
            _mark_nonfinite(group, flag, torch.ones((), device=device))
            self._flag.copy_(torch.maximum(self._flag, flag.to(self._flag.device)))

    def _mark_by_norm(self, tensors: list[Tensor]) -> None:
        norm = get_total_norm([_dense_values(tensor) for tensor in tensors])
        self._flag.copy_(torch.maximum(self._flag, (~norm.isfinite()).to(self._flag)))


def _mark_nonfinite(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    # Private to torch, but the only kernel that checks a whole list at once.
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, one)


def has_nonfinite(tensor: Tensor) -> bool:
    """Check whether a dense or sparse tensor has a NaN or an infinity; waits for the device."""
    return not bool(_dense_values(tensor).isfinite().all())


def _dense_values(tensor: Tensor) -> Tensor:
    # Coalesced, because rows that occur twice may be finite each and overflow together.
    if tensor.is_sparse:
        return tensor.coalesce().values()
    return tensor
