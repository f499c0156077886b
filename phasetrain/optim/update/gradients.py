"""Gradient processing between the backward pass and the optimizer: check, clip, drop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from phasetrain.distributed import Strategy
from phasetrain.errors import is_out_of_memory
from phasetrain.optim.update.sparse import coalesce_gradients, dense_views


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are limited, and which of them are sparse.

    The builder reads the fields that have the name of a key of OPTIMIZER.

    Attributes:
        clip_norm: maximum Euclidean norm of the whole gradient, or None.
        clip_value: maximum absolute value of a gradient entry, or None.
        sparse: trained parameters whose gradients are sparse.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    sparse: Sequence[Tensor] = ()


class GradientPipeline:
    """Checks, clips and drops the gradients of an optimizer's parameters.

    Args:
        optimizer: optimizer over all trained parameters.
        strategy: how ranks share an update.
        settings: limits.

    Attributes:
        parameters: trained parameters in the optimizer's order.
        device: device of the first parameter.
        frozen: parameters that must not move in the current update; their gradients are dropped.
        clips: whether gradients are limited.
        norm: Euclidean norm of the gradient before clipping, 0-d; None without `clip_norm`.
    """

    def __init__(
        self, optimizer: Optimizer, strategy: Strategy, settings: GradientSettings
    ) -> None:
        self.settings = settings
        self.parameters: list[Tensor] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self.device = self.parameters[0].device
        self.frozen: Sequence[Tensor] = ()
        self.clips = settings.clip_norm is not None or settings.clip_value is not None
        self.norm: Tensor | None = None
        self._optimizer = optimizer
        self._strategy = strategy
        # Clipping by value first would hide an infinity from a norm that is taken afterwards.
        self._norm_shows_all = settings.clip_norm is not None and settings.clip_value is None
        # The norm is that of the whole gradient on every rank; the gradients may be sharded.
        needs_all_ranks = strategy.shards_optimizer and not self._norm_shows_all
        any_rank = None
        if needs_all_ranks:
            any_rank = strategy.any_rank
        self._check = FiniteCheck(self.device, any_rank)
        self._has_own_zero_grad = type(optimizer).zero_grad is not Optimizer.zero_grad

    def drop_frozen(self) -> None:
        """Drop the gradients of parameters that must not move."""
        for parameter in self.frozen:
            parameter.grad = None

    def coalesce(self) -> None:
        """Add up rows that occur more than once in sparse gradients."""
        coalesce_gradients(self.settings.sparse)

    def are_finite(self, loss: Tensor | None = None) -> bool:
        """Check all gradients on all ranks, and the loss; waits for the device, once."""
        losses = [] if loss is None else [loss]
        return self._check.all_finite([*losses, *self._evidence()])

    def mark_nonfinite(self, loss: Tensor) -> Tensor:
        """Return a device flag that is 1 if the loss or a gradient is not finite on any rank."""
        self._check.reset()
        return self._check.mark([loss, *self._evidence()], everywhere=True)

    def clip(self) -> None:
        """Limit the gradients once per update, after unscaling: values first, then the norm."""
        settings = self.settings
        parameters = dense_views(self.parameters) if settings.sparse else self.parameters
        if settings.clip_value is not None:
            clip_grad_value_(parameters, settings.clip_value)
        if settings.clip_norm is not None:
            # The check may have computed it already; a second norm would double the cost.
            if self.norm is None:
                self.norm = self._strategy.gradient_norm(self._gradients())
            clip_grads_with_norm_(parameters, settings.clip_norm, self.norm)

    def drop(self) -> None:
        """Set every gradient to None."""
        # Optimizers of other libraries may keep more than `.grad`.
        if self._has_own_zero_grad:
            self._optimizer.zero_grad(set_to_none=True)
            return
        # The same as torch's own zero_grad, which takes several microseconds longer.
        for parameter in self.parameters:
            parameter.grad = None

    def take(self) -> list[Tensor | None]:
        """Return the gradients in the order of `parameters`, and drop them.

        They are the mean over all ranks, and multiplied by the scale if there is a scaler.
        """
        taken = [parameter.grad for parameter in self.parameters]
        self.drop()
        return taken

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Set the gradients, such as a combination of several that `take` has returned."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _evidence(self) -> list[Tensor]:
        """Return tensors that are finite exactly if the gradient is: its norm, or all of it."""
        gradients = self._gradients()
        if not self._norm_shows_all:
            return gradients
        self.norm = self._strategy.gradient_norm(gradients)
        return [self.norm]

    def _gradients(self) -> list[Tensor]:
        parameters = self.parameters
        if self.settings.sparse:
            parameters = dense_views(parameters)
        return [grad for parameter in parameters if (grad := parameter.grad) is not None]


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
        except (AttributeError, RuntimeError) as error:
            if not self._fallbacks or is_out_of_memory(error):
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
