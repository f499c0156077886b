"""The way of the gradients from the backward pass to the optimizer: prepare, check, clip, drop."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from phasetrain.distributed import Strategy
from phasetrain.optim.update.finite_check import FiniteCheck, has_nonfinite
from phasetrain.optim.update.nonfinite import MAX_NAMES
from phasetrain.optim.update.sparse import coalesce_gradients, dense_views


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are limited, and which of them are sparse.

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

    def are_finite(self) -> bool:
        """Check all gradients on all ranks; waits for the device."""
        return self._check.all_finite(self._evidence())

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

    def name_nonfinite(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of parameters whose gradient is not finite; every rank must call this.

        Args:
            names: names of all parameters in order; those missing are numbered.
        """
        bad = [
            number
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is not None and has_nonfinite(parameter.grad)
        ]
        if self._strategy.shards_optimizer:
            # Each rank sees only its shards, and the message has to name the same weights on all
            # ranks.
            gathered = self._strategy.world.all_gather(bad)
            bad = sorted({number for numbers in gathered for number in numbers})
        return tuple(
            names[number] if number < len(names) else f"parameter {number}"
            for number in bad[:MAX_NAMES]
        )

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
