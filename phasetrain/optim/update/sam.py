"""Sharpness-aware minimisation around any optimizer (OPTIMIZER.sam)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.optim.update.nonfinite import Buffers, not_finite

TINY = 1e-12
"""Added to the norm of the gradient."""


@dataclass(frozen=True)
class SamSettings:
    """How far the weights go up before the gradient is taken.

    Attributes:
        rho: distance, in the Euclidean norm of all weights.
        adaptive: each entry goes in proportion to the square of its weight (Kwon et al. 2021,
            arXiv:2102.11600).

    Raises:
        ValueError: no distance.
    """

    rho: float = 0.05
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rho < inf:
            raise ValueError(f"rho = {self.rho}: expected a distance above 0")


def sam_settings(section: Mapping[str, Any]) -> SamSettings:
    """Return the settings of OPTIMIZER.sam.

    Raises:
        ConfigError: a key that it does not have, or a value that is none.
    """
    for key, value in section.items():
        if key not in ("rho", "adaptive"):
            raise ConfigError(
                f"OPTIMIZER.sam.{key}: no such key{did_you_mean(key, ('rho', 'adaptive')) or ';'} it has rho, adaptive"
            )
        if isinstance(value, bool) != (key == "adaptive") or not isinstance(value, int | float):
            expected = "true or false" if key == "adaptive" else "a distance above 0, such as 0.05"
            raise ConfigError(f"OPTIMIZER.sam.{key} = {value!r}: expected {expected}")
    try:
        return SamSettings(**section)
    except ValueError as error:
        raise ConfigError(f"OPTIMIZER.sam.{error}") from error


class SharpnessAware:
    """Moves the weights to where the loss around them is about the largest, and back (Foret et al.
    2021, arXiv:2010.01412).

    With gradient g they go to w + e, where e = rho * g / |g|, or rho * w**2 * g / |w * g| if
    adaptive. The optimizer then steps from w with the gradient at w + e. What a forward pass
    changes beside the weights (running statistics, queues) is the same before both passes, and is
    kept of the first one.

    Args:
        settings: how far.
        weights: what is trained.
        buffers: returns what a forward pass changes.
    """

    def __init__(
        self,
        settings: SamSettings,
        weights: Sequence[Tensor],
        buffers: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.settings = settings
        self.is_up = False
        self.asked = False
        self._weights = list(weights)
        self._start: list[Tensor] = []
        self._fault: Tensor | None = None
        self._before = Buffers(buffers)
        self._after = Buffers(buffers)

    def begin(self) -> None:
        """Note what the first pass begins with."""
        self.asked = False
        self._before.keep()

    def check(self) -> None:
        """Refuse an update for which the weights were never asked to climb.

        Raises:
            ConfigError: there was no ascent since `begin`.
        """
        if not self.asked:
            raise ConfigError(
                "OPTIMIZER.sam: this task makes updates of its own, without the second pass; let its train_step call "
                "updater.ascent(), as that of phasetrain.tasks.Task does, or set OPTIMIZER.sam=null"
            )

    @torch.no_grad()
    def climb(self, norm: Callable[[list[Tensor]], Tensor], *, reads: bool) -> bool:
        """Move the weights by their gradients; return whether they moved.

        Args:
            norm: of the whole gradient, from what this process has of it.
            reads: look whether the gradient is finite, and stay if not, so that the update is
                refused for it. Else nothing waits for the device, and the second gradient is made
                not finite where the first one is.
        """
        self.asked = True
        pairs = [(weight, grad) for weight in self._weights if (grad := weight.grad) is not None]
        weights = [weight for weight, _ in pairs]
        gradients = [grad for _, grad in pairs]
        if self.settings.adaptive:
            moves = torch._foreach_mul(gradients, torch._foreach_abs(weights))
        else:
            moves = tuple(gradients)
        size = norm(list(moves))
        if reads and not size.isfinite():
            if not any(
                not_finite(grad) for grad in gradients
            ):  # their squares overflow: no update can be made of them
                torch._foreach_mul_(gradients, torch.nan)
            return False
        self._fault = None if reads else torch.where(size.isfinite(), 0.0, torch.nan)
        scale = self.settings.rho / (size + TINY)
        if self.settings.adaptive:
            moves = torch._foreach_mul(moves, torch._foreach_abs(weights))
        if not self._start:
            self._start = [torch.empty_like(weight) for weight in self._weights]
        torch._foreach_copy_(self._start, self._weights)
        torch._foreach_add_(weights, torch._foreach_mul(moves, scale))
        self._after.keep()
        self._before.restore()
        self.is_up = True
        return True

    @torch.no_grad()
    def descend(self) -> None:
        """Put weights and buffers back, bit for bit."""
        if self.is_up:
            torch._foreach_copy_(self._weights, self._start)
            self._after.restore()
            self.is_up = False
            gradient = next(
                (grad for weight in self._weights if (grad := weight.grad) is not None), None
            )
            if self._fault is not None and gradient is not None:
                gradient[(0,) * gradient.ndim] += self._fault
