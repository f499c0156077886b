"""The ways to step an optimizer: at once, gated by the device, or through a gradient scaler."""

from abc import ABC, abstractmethod
from math import isfinite

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from phasetrain.optim.update.gradients import GradientPipeline
from phasetrain.optim.update.nonfinite import NonFiniteGuard, OnSkip


class Stepper(ABC):
    """Steps an optimizer unless the update is not finite.

    Args:
        optimizer: optimizer to step.
        gradients: gradients of its parameters.
        guard: policy for updates that are not finite.

    Attributes:
        lag: number of updates by which the verdict on an update comes late.
    """

    lag = 0

    def __init__(
        self, optimizer: Optimizer, gradients: GradientPipeline, guard: NonFiniteGuard
    ) -> None:
        self.optimizer = optimizer
        self.gradients = gradients
        self.guard = guard

    @property
    def waits(self) -> bool:
        """Whether each update waits for a device other than the CPU to report its verdict."""
        return self.guard.watches and not self.lag and self.gradients.device.type != "cpu"

    @abstractmethod
    def step(self, loss: Tensor | None, on_skip: OnSkip) -> bool | Tensor:
        """Update the weights, and return whether the update was withheld.

        Args:
            loss: loss of the update, 0-d; None if unknown.
            on_skip: called if it was withheld: at once, or with a lag in the next step.

        Returns:
            a bool, or with a lag a 0-d tensor that is nonzero if the update was withheld.

        Raises:
            NumericsError: the run has to stop; the weights have not moved.
        """

    def forget(self) -> None:  # noqa: B027 - most steppers remember nothing
        """Forget past updates, because the state of the optimizer was replaced."""

    def _skip(self, loss: float, on_skip: OnSkip) -> None:
        # Names first: they are read from the gradients, and restoring or raising would lose them.
        names = self.gradients.name_nonfinite(self.guard.settings.names)
        self.guard.restore_point.restore()
        self.guard.skip(loss, names, on_skip)


class ImmediateStepper(Stepper):
    """Reads the verdict from the device, then steps."""

    def step(self, loss: Tensor | None, on_skip: OnSkip) -> bool:
        """Check, then clip and step."""
        if self.guard.watches:
            value = 0.0
            if loss is not None:
                value = loss.item()
            # The gradients are checked on all ranks, so all skip or none; the loss is the global
            # one.
            if not self.gradients.are_finite() or not isfinite(value):
                self._skip(value, on_skip)
                return True
            self.guard.in_row = 0
        if self.gradients.clips:
            self.gradients.clip()
        self.optimizer.step()
        return False


class GatedStepper(Stepper):
    """Lets the device decide: its kernels leave weights and state alone if `found_inf` is 1."""

    lag = 1

    def __init__(
        self, optimizer: Optimizer, gradients: GradientPipeline, guard: NonFiniteGuard
    ) -> None:
        super().__init__(optimizer, gradients, guard)
        # For the first update of each weight, see `step`.
        self._immediate = ImmediateStepper(optimizer, gradients, guard)
        self._initialized: set[int] = set()

    def step(self, loss: Tensor | None, on_skip: OnSkip) -> bool | Tensor:
        """Step with the gate set, and leave the verdict for the next update."""
        # The verdict on the previous update: its kernels are done or nearly so, while reading the
        # verdict on this one would leave the device idle until the host has queued the next forward
        # pass.
        self.guard.resolve()
        stepping = {id(p) for p in self.gradients.parameters if p.grad is not None}
        if not stepping <= self._initialized:
            # The first update of a parameter creates its state, and fused SGD leaves the state
            # uninitialised if that update is gated.
            withheld = self._immediate.step(loss, on_skip)
            if not withheld:
                self._initialized |= stepping
            return withheld
        total = torch.zeros((), device=self.gradients.device) if loss is None else loss.detach()
        # Before clipping, which spreads a NaN to all gradients.
        flag = self.gradients.mark_nonfinite(total)
        if self.gradients.clips:
            self.gradients.clip()
        # GradScaler passes `found_inf` to fused optimizers as an attribute, too.
        attributes = vars(self.optimizer)
        attributes.update(found_inf=flag, grad_scale=None)
        try:
            self.optimizer.step()
        finally:
            del attributes["found_inf"], attributes["grad_scale"]
        # Fused kernels withhold weights and optimizer state; running statistics were written by the
        # forward pass, and only a copy brings them back.
        self.guard.restore_point.restore_where(flag)
        self.guard.defer(flag, total, on_skip)
        return flag

    def forget(self) -> None:
        """Step the next update of each parameter immediately."""
        self._initialized = set()


class ScaledStepper(Stepper):
    """Steps through a gradient scaler, which skips overflows and lowers its scale.

    Args:
        optimizer: optimizer to step.
        gradients: gradients of its parameters.
        guard: policy for updates that are not finite.
        scaler: gradient scaler.
        lag: 1 reads the verdict one update later.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: GradientPipeline,
        guard: NonFiniteGuard,
        scaler: GradScaler,
        lag: int,
    ) -> None:
        super().__init__(optimizer, gradients, guard)
        self.scaler = scaler
        self.lag = lag

    def step(self, loss: Tensor | None, on_skip: OnSkip) -> bool | Tensor:
        """Unscale, clip and step, and compare the scale before and after."""
        guard = self.guard
        guard.resolve()
        if guard.watches and not self.lag and loss is not None:
            value = loss.item()
            if not isfinite(value):
                # No scale makes such a loss finite: it is no overflow of the scaled gradient.
                self._skip(value, on_skip)
                return True
        # The scaler does not say whether it skipped; a falling scale does, without a
        # synchronization.
        before = self._current_scale()
        if self.gradients.clips:
            # Limits are in units of the true gradient; the scaler remembers that it has unscaled.
            self.scaler.unscale_(self.optimizer)
            self.gradients.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = self._current_scale()
        # A scale of 0 cannot fall any further; the update was skipped nevertheless.
        skipped = (after < before) | (after == 0)
        if guard.watches:
            if loss is None:
                loss = torch.zeros(())
            self._report(skipped, loss, after, on_skip)
        return skipped

    def _report(self, skipped: Tensor, loss: Tensor, scale: Tensor, on_skip: OnSkip) -> None:
        guard = self.guard
        if self.lag:
            guard.restore_point.restore_where(skipped)
            # The tensors stay on the device until the next update, so nothing waits here.
            guard.defer(skipped, loss, on_skip, scale)
        elif not skipped:
            guard.in_row = 0
        else:
            guard.restore_point.restore()
            names = None
            # Names are for the error that ends the run; clipping has spread a NaN to all gradients.
            if guard.would_stop(scaled=True) and not self.gradients.clips:
                names = self.gradients.name_nonfinite(guard.settings.names)
            guard.skip(loss.item(), names, on_skip, scale.item())

    def _current_scale(self) -> Tensor:
        # `get_scale()` would wait for the device; scaling a 1 does not.
        return self.scaler.scale(torch.ones((), device=self.gradients.device))


def make_stepper(
    optimizer: Optimizer,
    gradients: GradientPipeline,
    guard: NonFiniteGuard,
    scaler: GradScaler | None,
) -> Stepper:
    """Return the stepper for an optimizer and the lag that the guard asks for.

    Raises:
        ValueError: a lag that the optimizer does not support.
    """
    # What GradScaler asks of an optimizer, too: whether its kernels leave the weights alone by
    # `found_inf`.
    can_lag = scaler is not None or vars(optimizer).get("_step_supports_amp_scaling", False)
    lag = guard.settings.lag
    # With `ignore` nobody reads a verdict, so nothing may be deferred either.
    if not guard.watches:
        lag = 0
    elif lag is None:
        lag = int(can_lag and gradients.device.type == "cuda")
    elif lag not in (0, 1) or (lag and not can_lag):
        raise ValueError(
            f"lag = {lag}: expected 0, or 1 with a gradient scaler or an optimizer whose fused "
            f"kernels can withhold an update on the device; this is {type(optimizer).__name__}"
        )
    if scaler is not None:
        return ScaledStepper(optimizer, gradients, guard, scaler, lag)
    if lag:
        return GatedStepper(optimizer, gradients, guard)
    return ImmediateStepper(optimizer, gradients, guard)
