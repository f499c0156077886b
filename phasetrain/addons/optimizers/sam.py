"""Sharpness-aware minimisation around any optimizer (OPTIMIZER.sam)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phasetrain.config.sections.optimizer import SamSection
from phasetrain.errors import ConfigError
from phasetrain.optim.update.gradients import has_nonfinite
from phasetrain.optim.update.guard import RestorePoint

TINY = 1e-12
"""Added to the norm of the gradient, so that a zero gradient does not divide by zero."""


class SamSettings(SamSection):
    """Settings of sharpness-aware minimization (OPTIMIZER.sam)."""

    def __call__(
        self, weights: Sequence[Tensor], buffers: Callable[[], Sequence[Tensor]]
    ) -> "SharpnessAware":
        """Return the ascent of an updater, see `SharpnessAware`."""
        return SharpnessAware(self, weights, buffers)


class SharpnessAware:
    """Moves the weights to the approximate maximum of the loss in their neighborhood, and back.

    Foret et al. 2021, arXiv:2010.01412. With gradient g the weights w move to w + e, where
    e = rho * g / |g|, or rho * w**2 * g / |w * g| if adaptive. The optimizer then steps from w with
    the gradient at w + e. Both forward passes start from the same buffers (running statistics,
    queues), and the buffers that the first one leaves are kept.

    Args:
        settings: length of the move.
        weights: trained parameters.
        buffers: returns the tensors that a forward pass changes.

    Attributes:
        is_up: whether the weights are at the maximum at the moment.
        was_asked: whether the task has called `climb` in this update.
    """

    def __init__(
        self,
        settings: SamSettings,
        weights: Sequence[Tensor],
        buffers: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.settings = settings
        self.is_up = False
        self.was_asked = False
        self._weights = list(weights)
        self._start: list[Tensor] = []
        self._poison: Tensor | None = None
        # Two copies: the second pass starts where the first one did, and the statistics that stay
        # are those of the pass at the weights themselves.
        self._before = RestorePoint(buffers)
        self._after = RestorePoint(buffers)

    def begin(self) -> None:
        """Copy the buffers that the first pass starts from."""
        self.was_asked = False
        self._before.save()

    def require_ascent(self) -> None:
        """Check that the task has computed the second gradient.

        Raises:
            ConfigError: there was no ascent since `begin`.
        """
        if not self.was_asked:
            raise ConfigError(
                "OPTIMIZER.sam: the train_step of this task does not make the second pass; let it "
                "call updater.ascent(), as phasetrain.tasks.Task.train_step does, or set "
                "OPTIMIZER.sam=null",
                code="config.conflict",
            )

    @torch.no_grad()
    def climb(self, norm: Callable[[list[Tensor]], Tensor], *, reads: bool) -> bool:
        """Move the weights along their gradients; return whether they moved.

        Args:
            norm: returns the norm of the whole gradient from the local part of it.
            reads: wait for the device to report whether the gradient is finite, and stay if it is
                not, so that the update is rejected for it. Otherwise nothing waits, and the second
                gradient is made non-finite if the first one is.
        """
        self.was_asked = True
        pairs = [(weight, grad) for weight in self._weights if (grad := weight.grad) is not None]
        weights = [weight for weight, _ in pairs]
        gradients = [grad for _, grad in pairs]
        # Foreach functions launch one kernel for all weights instead of one per weight. They are
        # private to torch, but its own optimizers use them.
        moves: tuple[Tensor, ...] = tuple(gradients)
        if self.settings.adaptive:
            moves = torch._foreach_mul(gradients, torch._foreach_abs(weights))
        size = norm(list(moves))
        if reads and not size.isfinite():
            if not any(has_nonfinite(grad) for grad in gradients):
                # Only the squares overflow: the guard must see it in the gradients themselves.
                torch._foreach_mul_(gradients, torch.nan)
            return False
        # Without a read the move happens in any case; the NaN goes into the second gradient in
        # `descend`, where the guard's check finds it.
        self._poison = None if reads else torch.where(size.isfinite(), 0.0, torch.nan)
        scale = self.settings.rho / (size + TINY)
        if self.settings.adaptive:
            moves = torch._foreach_mul(moves, torch._foreach_abs(weights))
        if not self._start:
            self._start = [torch.empty_like(weight) for weight in self._weights]
        # Subtracting the move again would round: the weights are copied to come back bit for bit.
        torch._foreach_copy_(self._start, self._weights)
        torch._foreach_add_(weights, torch._foreach_mul(moves, scale))
        self._after.save()
        self._before.restore()
        self.is_up = True
        return True

    @torch.no_grad()
    def descend(self) -> None:
        """Put weights and buffers back, bit for bit."""
        if not self.is_up:
            return
        torch._foreach_copy_(self._weights, self._start)
        self._after.restore()
        self.is_up = False
        gradients = [grad for weight in self._weights if (grad := weight.grad) is not None]
        if self._poison is not None and gradients:
            first = gradients[0]
            # One entry is enough for the check, and adding 0.0 to it leaves a good gradient as it
            # is.
            first[(0,) * first.ndim] += self._poison
