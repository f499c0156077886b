"""One optimizer update: schedules, backward passes, and the step unless it is not finite."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import isfinite

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from phasetrain.distributed import AsyncMean, Strategy, World
from phasetrain.distributed.strategies.base import sum_losses
from phasetrain.optim.schedules.param_schedules import ParamSchedules, Schedules
from phasetrain.optim.update.gradients import GradientPipeline, GradientSettings
from phasetrain.optim.update.guard import NonFiniteGuard, OnSkip, choose_lag, ignore_skip
from phasetrain.optim.update.nonfinite import STOP, GuardSettings, name_nonfinite
from phasetrain.optim.update.state import Ascent, MakeAscent, UpdaterState


class Updater(UpdaterState):
    """Turns losses into updates of the weights.

    Args:
        optimizer: optimizer over all trained parameters; schedules multiply the options of its
            groups.
        scaler: gradient scaler, or None.
        schedules: how its options change over the run.
        gradients: how gradients are limited.
        guard: policy for losses and gradients that are not finite.
        strategy: how ranks share an update; default: a single process.
        sam: how to take the gradient next to the weights, see `ascent`; None takes it at the
            weights.

    Attributes:
        gradients: gradients of the trained parameters; `gradients.norm` is the norm before
            clipping, `gradients.frozen` the parameters that must not move.
        guard: count of skipped updates.
        names: names of the trained parameters in the optimizer's order; empty if unknown.
        lag: number of updates by which the verdict on an update comes late.
        schedules: values of scheduled options.
        loss: mean loss of the last update over all ranks, 0-d; None in a single process.
        skipped: whether the last update was skipped; with a lag, a 0-d tensor that is nonzero if
            it was.
        has_gradient: whether a backward pass has run since the last step.

    Raises:
        ConfigError: a schedule for an option that the optimizer does not have.
        ValueError: a lag that the optimizer does not support.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        schedules: Schedules | None = None,
        gradients: GradientSettings | None = None,
        guard: GuardSettings = STOP,
        strategy: Strategy | None = None,
        sam: MakeAscent | None = None,
    ) -> None:
        self.strategy = strategy or Strategy(World())
        self.optimizer = optimizer
        self.scaler = scaler
        self.schedules = ParamSchedules(optimizer.param_groups, schedules or Schedules())
        self.gradients = GradientPipeline(optimizer, self.strategy, gradients or GradientSettings())
        self.guard = NonFiniteGuard(guard)
        self.names = tuple(guard.names)
        self.lag = choose_lag(optimizer, scaler, guard, self.gradients.device)
        self.sam: Ascent | None = None
        if sam is not None:
            self.sam = sam(self.gradients.parameters, guard.buffers)
        self.loss: Tensor | None = None
        self.skipped: bool | Tensor = False
        self.has_gradient = False
        # Copied now, before a schedule writes into the groups: `state_dict` saves only options that
        # the optimizer itself has changed since.
        self._initial_options = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        # Adding up the loss costs a kernel per micro-batch, so it is done only for a reader.
        self._needs_loss = self.strategy.has_global_loss or self.guard.watches
        # Loss of the update under way: its sum, its terms, and their means over ranks in flight.
        self._total: Tensor | None = None
        self._terms: list[Tensor] = []
        self._means: list[AsyncMean] = []
        self._is_second_pass = False
        # `id` of each parameter whose state the optimizer has created, see `_step_gated`.
        self._started: set[int] = set()
        self._used_lr = self.optimizer.param_groups[0].get("lr")
        self._step_weights = self._step_at_once
        if scaler is not None:
            self._step_weights = self._step_scaled
        elif self.lag:
            self._step_weights = self._step_gated

    def begin(
        self,
        where: float,
        stage: int = 0,
        within: float = 0.0,
        epoch_start: tuple[float, float] | None = None,
    ) -> None:
        """Begin an update: set every scheduled option, see `ParamSchedules.apply`."""
        # Copies come first: schedules and SAM's first pass belong to the update that may be undone.
        if self.guard.saves:
            self.guard.restore_point.save()
        if self.sam is not None:
            self.sam.begin()
        self.schedules.apply(self.optimizer.param_groups, where, stage, within, epoch_start)
        self._used_lr = self.optimizer.param_groups[0].get("lr")

    def backward(
        self,
        loss: Tensor,
        share: float = 1.0,
        *,
        last: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Add the gradient of `share * loss`.

        Args:
            loss: loss of a micro-batch, 0-d.
            share: weight of the micro-batch in the update; they sum to 1, or to the world size if
                the strategy averages gradients over ranks.
            last: no micro-batch follows, so the reduction of the loss may overlap with the
                backward pass.
            inputs: parameters that get the gradient; None: all that the loss depends on.
        """
        self.has_gradient = True
        # A multiplication by 1 would launch a kernel and add a node to the graph for nothing.
        if share != 1.0:
            loss = loss * share
        # The loss of an update is that of SAM's first pass.
        if self._needs_loss and not self._is_second_pass:
            self._add_loss(loss.detach(), last=last)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    def _add_loss(self, loss: Tensor, *, last: bool) -> None:
        """Add the loss of a micro-batch, weighted by its share, to the loss of the update."""
        if self.strategy.has_global_loss:
            self._terms.append(loss)
            # Started before the last backward pass, so that the reduction over ranks overlaps with
            # it.
            if last:
                self._reduce_loss()
        elif self._total is None:
            self._total = loss
        else:
            self._total = self._total + loss

    def _reduce_loss(self) -> None:
        # One mean for each pass: ordered reduction adds the shards of a pass along one tree.
        self._means.append(self.strategy.mean_loss(self._terms))
        self._terms = []

    def _collect(self) -> None:
        """Wait for the gradients and the loss that all ranks share."""
        self.strategy.collect_gradients()
        if self._terms:  # a caller who does not say which micro-batch is the last one
            self._reduce_loss()
        if self._means:
            self.loss = sum_losses([mean.wait() for mean in self._means])
            self._total = self.loss
            self._means = []

    @contextmanager
    def ascent(self) -> Iterator[bool]:
        """Move the weights up along the gradient and drop it; put the weights back afterwards.

        Yields:
            whether the weights have moved and the caller has to compute a gradient there; False if
            the first gradient is not finite.
        """
        assert self.sam is not None, "there is no ascent without OPTIMIZER.sam"
        if self.strategy.has_global_loss:
            self._collect()
        self.gradients.drop_frozen()
        # With a lag the host must not wait here either; `climb` then marks the second gradient
        # instead.
        reads = self.guard.watches and not self.lag
        if not self.sam.climb(self.strategy.gradient_norm, reads=reads):
            yield False
            return
        self.gradients.drop()
        self._is_second_pass = True
        try:
            yield True
        finally:
            self._is_second_pass = False
            self.sam.descend()

    def step(self, on_skip: OnSkip = ignore_skip) -> None:
        """Update the weights once, unless the gradients or the loss are not finite; drop the
        gradients.

        Args:
            on_skip: called if the update was skipped: at once, or with a lag in the next step.

        Raises:
            NumericsError: the run has to stop, see `GuardSettings`; the weights have not moved.
        """
        # A hook may set another one before it is logged. Not a float: that may wait for a device.
        self._used_lr = self.optimizer.param_groups[0].get("lr")
        # A norm left over from the last update would be taken for this one's.
        self.gradients.norm = None
        if self.sam is not None:
            self.sam.require_ascent()
        if self.strategy.has_global_loss:
            self._collect()
        # Dropped after the ranks have exchanged gradients (all must reduce the same buckets), and
        # before the norm is taken: weights that do not move must not count in clipping.
        if self.gradients.frozen:
            self.gradients.drop_frozen()
        if self.gradients.settings.sparse:
            self.gradients.coalesce()
        try:
            self.skipped = self._step_weights(self._total, on_skip)
        finally:
            # Also if the run stops: a gradient left behind would be added to the next update of a
            # caller who catches the error and continues.
            self._total = None
            self.has_gradient = False
            self.gradients.drop()

    def _step_at_once(self, loss: Tensor | None, on_skip: OnSkip) -> bool | Tensor:
        """Read from the device whether the update is finite, then clip and step.

        This and the other two ways to step return whether the update was skipped.
        """
        if self.guard.watches:
            # All ranks check all gradients and the global loss, so all skip or none.
            if not self.gradients.are_finite(loss):
                self._skip(0.0 if loss is None else loss.item(), on_skip)
                return True
            self.guard.in_row = 0
        if self.gradients.clips:
            self.gradients.clip()
        self.optimizer.step()
        return False

    def _step_gated(self, loss: Tensor | None, on_skip: OnSkip) -> bool | Tensor:
        """Let the device decide: its kernels leave weights and state alone if `found_inf` is 1.

        The verdict is left for the next update.
        """
        # The verdict on the previous update: its kernels are done or nearly so, while reading the
        # verdict on this one would leave the device idle until the host has queued the next forward
        # pass.
        self.guard.resolve()
        stepping = {id(p) for p in self.gradients.parameters if p.grad is not None}
        if not stepping <= self._started:
            # The first update of a parameter creates its state, and fused SGD leaves the state
            # uninitialised if that update is gated.
            if self._step_at_once(loss, on_skip):
                return True
            self._started |= stepping
            # A tensor as in later updates, because averages choose their kernels by the type: this
            # may be the first update after a resume.
            return torch.zeros((), device=self.gradients.device)
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

    def _step_scaled(self, loss: Tensor | None, on_skip: OnSkip) -> bool | Tensor:
        """Step through the gradient scaler, which skips overflows and lowers its scale."""
        assert self.scaler is not None
        self.guard.resolve()
        if self.guard.watches and not self.lag and loss is not None:
            value = loss.item()
            if not isfinite(value):
                # No scale makes such a loss finite: this is not an overflow of the scaled gradient.
                self._skip(value, on_skip)
                return True
        # The scaler does not say whether it skipped; a falling scale does. `get_scale()` would wait
        # for the device, scaling a 1 does not.
        unit = torch.ones((), device=self.gradients.device)
        before = self.scaler.scale(unit)
        if self.gradients.clips:
            # Limits are in units of the true gradient; the scaler remembers that it has unscaled.
            self.scaler.unscale_(self.optimizer)
            self.gradients.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = self.scaler.scale(unit)
        # A scale of 0 cannot fall any further; the update was skipped nevertheless.
        skipped = (after < before) | (after == 0)
        if self.guard.watches:
            loss = torch.zeros(()) if loss is None else loss
            self._report_scaled(skipped, loss, after, on_skip)
        return skipped

    def _report_scaled(self, skipped: Tensor, loss: Tensor, scale: Tensor, on_skip: OnSkip) -> None:
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
                names = name_nonfinite(self.gradients.parameters, self.names, self.strategy)
            guard.skip(loss.item(), names, on_skip, scale.item())

    def _skip(self, loss: float, on_skip: OnSkip) -> None:
        # Names first: they are read from the gradients, and restoring or raising would lose them.
        names = name_nonfinite(self.gradients.parameters, self.names, self.strategy)
        self.guard.restore_point.restore()
        self.guard.skip(loss, names, on_skip)

    def skip(self) -> None:
        """Make no update; the norm and the loss of the one before are forgotten."""
        self.guard.resolve()
        self.gradients.norm = None
        self.skipped = True
        self.loss = None

    def drop_gradients(self) -> None:
        """Set every gradient to None."""
        self.has_gradient = False
        self.gradients.drop()

    def resolve(self) -> None:
        """Wait for the verdict on the last update, if it is pending.

        Raises:
            NumericsError: the run has to stop for it.
        """
        self.guard.resolve()
