"""One optimizer update: schedules, backward pass, gradient pipeline, step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from phasetrain.distributed import Strategy, World
from phasetrain.optim.schedules.param_schedules import ParamSchedules, Schedules
from phasetrain.optim.update.gradients import GradientPipeline, GradientSettings
from phasetrain.optim.update.nonfinite import (
    STOP,
    GuardSettings,
    NonFiniteGuard,
    OnSkip,
    ignore_skip,
)
from phasetrain.optim.update.sam import SamSettings, SharpnessAware
from phasetrain.optim.update.state import (
    changed_options,
    list_strides,
    load_optimizer,
    restore_strides,
)
from phasetrain.optim.update.steppers import make_stepper
from phasetrain.optim.update.update_loss import UpdateLoss


class Updater:
    """Turns losses into updates of the weights.

    Args:
        optimizer: optimizer over all trained parameters; schedules multiply the options of its
            groups.
        scaler: gradient scaler, or None.
        schedules: how its options change over the run.
        gradients: how gradients are limited.
        guard: policy for losses and gradients that are not finite.
        strategy: how ranks share an update; default: a single process.
        sam: take the gradient next to the weights, see `ascent`; None takes it at the weights.

    Attributes:
        gradients: gradients of the trained parameters; `gradients.norm` is the norm before
            clipping, `gradients.frozen` the parameters that must not move.
        guard: count of skipped updates.
        names: names of the trained parameters in the optimizer's order; empty if unknown.
        stepper: steps the optimizer.
        schedules: values of scheduled options.
        loss: mean loss of the last update over all ranks, 0-d; None in a single process.
        withheld: whether the last update was skipped; with a lag, a 0-d tensor that is nonzero if
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
        sam: SamSettings | None = None,
    ) -> None:
        self.strategy = strategy or Strategy(World())
        self.optimizer = optimizer
        self.scaler = scaler
        self.schedules = ParamSchedules(optimizer.param_groups, schedules or Schedules())
        self.gradients = GradientPipeline(optimizer, self.strategy, gradients or GradientSettings())
        # The guard exists before the stepper, which reads from it whether the verdict may lag.
        self.guard = NonFiniteGuard(guard)
        self.names = tuple(guard.names)
        self.stepper = make_stepper(optimizer, self.gradients, self.guard, scaler)
        self.sam: SharpnessAware | None = None
        if sam is not None:
            self.sam = SharpnessAware(sam, self.gradients.parameters, guard.buffers)
        self.loss: Tensor | None = None
        self.withheld: bool | Tensor = False
        self.has_gradient = False
        # Copied now, before a schedule writes into the groups: `state_dict` saves only options that
        # the optimizer itself has changed since.
        self._initial_options = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._update_loss = UpdateLoss(self.strategy)
        # Adding up the loss costs a kernel per micro-batch, so it is done only for a reader.
        self._needs_loss = self.strategy.has_global_loss or self.guard.watches
        self._is_second_pass = False

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, as the last update used it."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def factor(self) -> float:
        """Factor of all learning rates from the next update on, on top of their schedules.

        It is part of the state.
        """
        return self.schedules.factor

    @factor.setter
    def factor(self, value: float) -> None:
        """Multiply all learning rates by `value` from the next update on."""
        self.schedules.factor = value

    def schedule(
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
            self._update_loss.add(loss.detach(), last=last)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    @contextmanager
    def ascent(self) -> Iterator[bool]:
        """Move the weights up along the gradient and drop it; put the weights back afterwards.

        Yields:
            whether the weights have moved and the caller has to compute a gradient there; False if
            the first gradient is not finite.
        """
        assert self.sam is not None, "there is no ascent without OPTIMIZER.sam"
        if self.strategy.has_global_loss:
            self.strategy.collect_gradients()
            self.loss = self._update_loss.collect()
        self.gradients.drop_frozen()
        # With a lag the host must not wait here either; `climb` then marks the second gradient
        # instead.
        reads = self.guard.watches and not self.stepper.lag
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
        # A norm left over from the last update would be taken for this one's.
        self.gradients.norm = None
        if self.sam is not None:
            self.sam.require_ascent()
        if self.strategy.has_global_loss:
            self.strategy.collect_gradients()
            self.loss = self._update_loss.collect()
        # Dropped after the ranks have exchanged gradients (all must reduce the same buckets), and
        # before the norm is taken: weights that do not move must not count in clipping.
        if self.gradients.frozen:
            self.gradients.drop_frozen()
        if self.gradients.settings.sparse:
            self.gradients.coalesce()
        try:
            self.withheld = self.stepper.step(self._update_loss.total, on_skip)
        finally:
            # Also if the run stops: a gradient left behind would be added to the next update of a
            # caller who catches the error and continues.
            self._update_loss.total = None
            self.has_gradient = False
            self.gradients.drop()

    def skip(self) -> None:
        """Make no update; the norm and the loss of the one before are forgotten."""
        self.guard.resolve()
        self.gradients.norm = None
        self.withheld = True
        self.loss = None
        self._update_loss.mean = None

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state that updates have accumulated.

        Options such as the learning rate belong to the config, unless the optimizer itself has
        changed them (a step size that it has found, say).

        Raises:
            NumericsError: the verdict on the last update was pending, and the run has to stop for
                it.
        """
        self.guard.resolve()
        # The optimizer's state goes through the strategy, which may have sharded it.
        state: dict[str, Any] = {
            "optimizer": self.strategy.state.optimizer_state(self.optimizer),
            "skipped": self.guard.skipped,
            "skipped_in_row": self.guard.in_row,
        }
        if strides := list_strides(state["optimizer"], self.gradients.parameters):
            state["strides"] = strides
        options = changed_options(
            self._initial_options, self.optimizer.param_groups, self.schedules.options
        )
        if any(options):
            state["options"] = options
        # The state is numbered; a run that takes it over finds its weights by name.
        if self.names:
            state["names"] = list(self.names)
        if entries := self.strategy.state.optimizer_entries(self.optimizer):
            state["entries"] = entries
        # Left out if it is 1: a run that never changes it keeps the same checkpoint content.
        if self.factor != 1.0:
            state["factor"] = self.factor
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`; the counts of skipped updates may be missing."""
        # A pending verdict and the list of initialized weights belong to the state that is
        # replaced.
        self.guard.restart(state.get("skipped", 0), state.get("skipped_in_row", 0))
        self.stepper.forget()
        factor = state.get("factor", 1.0)
        # The setter adds schedules for constant learning rates, which a run without a factor lacks.
        if factor != self.factor:
            self.factor = factor
        restore_strides(state["optimizer"], state.get("strides", ()))
        load_optimizer(
            self.strategy,
            self.optimizer,
            self.gradients.parameters,
            state["optimizer"],
            state.get("entries", {}),
        )
        # Looked up after loading: torch replaces the dicts in `param_groups`, and options written
        # to the old ones would silently have no effect.
        groups = self.optimizer.param_groups
        for group, options in zip(groups, state.get("options", ()), strict=False):
            group.update(options)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def load_optimizer_state(self, saved: Mapping[int, Any]) -> None:
        """Load the state of some parameters by their number, and drop the state of all others.

        Args:
            saved: number of the parameter -> its state, as in the `optimizer` of `state_dict`.
        """
        self.stepper.forget()
        load_optimizer(self.strategy, self.optimizer, self.gradients.parameters, saved, {})
