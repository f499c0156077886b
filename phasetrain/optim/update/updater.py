"""One optimizer update: schedules, backward, unscaling, the check for what is not finite, clipping,
step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import isfinite
from typing import Any

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from phasetrain.distributed import AsyncMean, Strategy, World
from phasetrain.optim.schedules.param_schedules import (
    NO_SCHEDULES,
    Course,
    OwnSchedules,
    StageOptions,
)
from phasetrain.optim.update.nonfinite import (
    NAMES,
    STOP,
    FiniteCheck,
    Guard,
    GuardSettings,
    Tell,
    nobody,
    not_finite,
)
from phasetrain.optim.update.sam import SamSettings, SharpnessAware
from phasetrain.optim.update.sparse import coalesce, holders
from phasetrain.optim.update.state import changed, take_over


class Updater:
    """Turns losses into updates of the weights.

    Args:
        optimizer: over all trained parameters; the options of its groups are the values that
            schedules multiply.
        scaler: gradient scaler, or None.
        schedules: option of the optimizer -> factor as a function of `where`; options without one
            stay constant.
        stages: what each stage of the run changes of them.
        own_schedules: of groups of other optimizers than the main one, see `Course`.
        clip_norm: largest norm of the whole gradient, or None.
        clip_value: largest absolute value of a gradient's entry, or None.
        guard: what is done where loss or gradient is not finite.
        strategy: how several processes share an update; one process does without.
        sam: the gradient is taken beside the weights, see `ascent`; None takes it where they are.
        sparse: trained parameters whose gradients are sparse.

    Attributes:
        loss: mean loss of the last update over all processes, 0-d; only known with several.
        norm: Euclidean norm of the last update's gradient before it was limited, 0-d; None without
            `clip_norm`.
        held: tensors of the optimizer that stand still in the update under way: their gradients are
            dropped.
        withheld: whether the last update was not made; on a device with a lag, a 0-d tensor that is
            not 0 then.
        lag: updates by which the verdict on an update comes late: 1 where the device withholds it
            by itself, else 0.

    Raises:
        ConfigError: a schedule for an option that the optimizer does not have.
        ValueError: a lag that the optimizer cannot have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        schedules: Mapping[str, ParamScheduler] | None = None,
        stages: Sequence[StageOptions] = (),
        own_schedules: OwnSchedules = NO_SCHEDULES,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        guard: GuardSettings = STOP,
        strategy: Strategy | None = None,
        sam: SamSettings | None = None,
        sparse: Sequence[Tensor] = (),
    ) -> None:
        self.strategy = strategy or Strategy(World())
        self.optimizer = optimizer
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.norm: Tensor | None = None
        self.held: Sequence[Tensor] = ()
        self.withheld: bool | Tensor = False
        self._course = Course(optimizer.param_groups, schedules or {}, stages, own_schedules)
        self._clips = clip_norm is not None or clip_value is not None
        # Limiting values would hide an infinity from a norm taken afterwards.
        self._norm_tells = clip_norm is not None and clip_value is None
        self._guard = Guard(guard)
        self._watches = guard.on_nonfinite != "ignore"
        self._keeps = self._watches and bool(guard.buffers())
        self._trained = self.parameters
        self._options = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._zeroes = (
            type(optimizer).zero_grad is not Optimizer.zero_grad
        )  # it has a way of its own
        self._device = self._trained[0].device
        # A norm is that of the whole gradient; gradients themselves may lie with one process each.
        asks = self.strategy.shards_optimizer and not self._norm_tells
        self._check = FiniteCheck(self._device, self.strategy.any_rank if asks else None)
        self.lag = self._lag(guard.lag) if self._watches else 0
        self._losses: list[Tensor] = []
        self._loss: Tensor | None = None
        self._reports = self.strategy.has_global_loss
        self._mean: AsyncMean | None = None
        self.loss: Tensor | None = None
        self._stepped: set[int] = set()
        self._sparse = list(sparse)
        self._sam = SharpnessAware(sam, self._trained, guard.buffers) if sam is not None else None
        self._again = False

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the optimizer's order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, as the last update used it."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def factor(self) -> float:
        """What all learning rates are multiplied by from the next update on, beside their
        schedules; it is state."""
        return self._course.factor

    @factor.setter
    def factor(self, value: float) -> None:
        """Multiply all learning rates by `value` from the next update on."""
        self._course.factor = value

    @property
    def waits(self) -> bool:
        """Whether each update waits for a device other than the CPU, to hear whether it is
        finite."""
        return self._watches and not self.lag and self._device.type != "cpu"

    @property
    def skipped(self) -> int:
        """Updates of the run that were skipped, as far as the device has reported."""
        return self._guard.skipped

    @property
    def skipped_in_row(self) -> int:
        """Updates skipped since the last one that was made, as far as the device has reported."""
        return self._guard.in_row

    def keep_too(self, tensors: Callable[[], Sequence[Tensor]]) -> None:
        """Leave these tensors as they were before `schedule`, too, where an update is not made (a
        teacher's, say)."""
        self._guard.buffers.add(tensors)
        self._keeps = self._watches

    def schedule(self, where: float, stage: int = 0, within: float = 0.0) -> None:
        """Begin an update: set every scheduled option to its value, see `Course.follow`."""
        if self._keeps:
            self._guard.buffers.keep()
        if self._sam is not None:
            self._sam.begin()
        self._course.follow(self.optimizer.param_groups, where, stage, within)

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
            loss: of a micro-batch, 0-d.
            share: of the update; all of them sum to 1, over processes whose gradients are averaged
                to their number.
            last: no other micro-batch follows, so that the loss can go round while the gradient is
                computed.
            inputs: parameters that get the gradient; None: all on which the loss depends.
        """
        if share != 1.0:
            loss = loss * share
        if self._again:
            pass  # the loss of an update is that of the first pass
        elif self._reports:
            self._losses.append(loss.detach())
            if last:
                self._mean = self.strategy.mean_loss(self._losses)
        elif self._watches:
            detached = loss.detach()
            self._loss = detached if self._loss is None else self._loss + detached
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    @property
    def climbs(self) -> bool:
        """Whether an update takes a second gradient, see `ascent`."""
        return self._sam is not None

    @contextmanager
    def ascent(self) -> Iterator[bool]:
        """Move the weights up along the gradient, drop it, and put them back afterwards, whatever
        happens there.

        Yields:
            whether they moved, and a gradient has to be taken there; not where the first one is not
            finite.
        """
        assert self._sam is not None, "there is no ascent without OPTIMIZER.sam"
        if self._reports:
            self._gather()
        self._drop_held()
        if not self._sam.climb(self.strategy.gradient_norm, reads=self._watches and not self.lag):
            yield False
            return
        self.drop_gradients()
        self._again = True
        try:
            yield True
        finally:
            self._again = False
            self._sam.descend()

    def step(self, tell: Tell = nobody) -> None:
        """Update the weights once from the gradients, unless they or the loss are not finite; drop
        the gradients.

        Args:
            tell: hears of an update that was skipped, at once or, with a lag, in the step after it.

        Raises:
            NumericsError: the run has to stop, see `GuardSettings`; the weights have not moved.
        """
        self.norm = None
        self.withheld = False
        if self._sam is not None:
            self._sam.check()
        if self._reports:
            self._gather()
        self._drop_held()
        if self._sparse:
            coalesce(self._sparse)
        try:
            if self.scaler is not None:
                self._step_scaled(self.scaler, tell)
            elif self.lag:
                self._step_gated(tell)
            else:
                self._step_at_once(tell)
        finally:
            self._loss = None
            self.drop_gradients()

    def _drop_held(self) -> None:
        for tensor in self.held:
            tensor.grad = None

    def _gather(self) -> None:
        """Take in what other processes have to do with this update: pieces of gradients, and its
        loss."""
        self.strategy.collect_gradients()
        if self._losses:
            self.loss = self._loss = (self._mean or self.strategy.mean_loss(self._losses)).wait()
            self._mean = None
            self._losses = []

    def clip(self) -> None:
        """Limit the gradients, once per update and after unscaling: values first, then the norm of
        the whole."""
        parameters = holders(self.parameters) if self._sparse else self.parameters
        if self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            if self.norm is None:
                self.norm = self.strategy.gradient_norm(self._gradients())
            clip_grads_with_norm_(parameters, self.clip_norm, self.norm)

    def resolve(self) -> None:
        """Wait for the verdict on the last update, if it is still out.

        Raises:
            NumericsError: the run has to stop for it.
        """
        self._guard.resolve()

    def _step_at_once(self, tell: Tell) -> bool:
        """Look, wait for the answer, then step; return whether it did."""
        if self._watches:
            loss = 0.0 if self._loss is None else self._loss.item()
            if not self._check.finite(self._evidence()) or not isfinite(loss):
                self.withheld = True
                self._guard.buffers.restore()
                self._guard.skip(loss, self._names(), tell)
                return False
            self._guard.in_row = 0
        if self._clips:
            self.clip()
        self.optimizer.step()
        return True

    def _step_gated(self, tell: Tell) -> None:
        """Let the device decide: its kernels leave weights and state alone where `found_inf` is
        1."""
        self._guard.resolve()
        stepping = {
            id(p)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        if not stepping <= self._stepped:
            # The first update of a weight makes its state, and fused SGD leaves that uninitialised
            # where it is gated.
            if self._step_at_once(tell):
                self._stepped |= stepping
            return
        loss = torch.zeros((), device=self._device) if self._loss is None else self._loss.detach()
        self._check.reset()
        self.withheld = flag = self._check.mark([loss, *self._evidence()], everywhere=True)
        if self._clips:
            self.clip()
        gate = vars(self.optimizer)
        gate.update(found_inf=flag, grad_scale=None)
        try:
            self.optimizer.step()
        finally:
            del gate["found_inf"], gate["grad_scale"]
        self._guard.buffers.restore_where(flag)
        self._guard.wait_for(flag, loss, tell)

    def _step_scaled(self, scaler: GradScaler, tell: Tell) -> None:
        """Let the scaler decide, and count: it lowers its scale where it has skipped."""
        self._guard.resolve()
        if (
            self._watches
            and not self.lag
            and self._loss is not None
            and not isfinite(loss := self._loss.item())
        ):
            # No scale makes it finite: this is no overflow, and the forward pass has seen it
            # already.
            self.withheld = True
            self._guard.buffers.restore()
            self._guard.skip(loss, self._names(), tell)
            return
        before = self._scale(scaler)
        if self._clips:
            scaler.unscale_(self.optimizer)
            self.clip()
        scaler.step(self.optimizer)
        scaler.update()
        after = self._scale(scaler)
        total = torch.zeros(()) if self._loss is None else self._loss
        self.withheld = skipped = (after < before) | (after == 0)
        if not self._watches:
            return
        if self.lag:
            self._guard.buffers.restore_where(skipped)
            self._guard.wait_for(skipped, total, tell, after)
        elif not skipped:
            self._guard.in_row = 0
        else:
            self._guard.buffers.restore()
            looks = (
                self._guard.would_stop(scaled=True) and not self._clips
            )  # clipping spreads a NaN to all of them
            self._guard.skip(total.item(), self._names() if looks else None, tell, after.item())

    def _evidence(self) -> list[Tensor]:
        """Return what is finite where the gradient is: the norm that clipping needs anyway, or all
        gradients."""
        gradients = self._gradients()
        if self._norm_tells:
            self.norm = self.strategy.gradient_norm(gradients)
            return [self.norm]
        return gradients

    def drop_gradients(self) -> None:
        """Set every gradient to None; torch's own `zero_grad` does the same and takes several
        microseconds to do it."""
        if self._zeroes:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for parameter in self._trained:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        trained = holders(self._trained) if self._sparse else self._trained
        return [grad for p in trained if (grad := p.grad) is not None]

    def _names(self) -> tuple[str, ...]:
        names = self._guard.settings.names
        bad = [
            n for n, p in enumerate(self.parameters) if p.grad is not None and not_finite(p.grad)
        ]
        if self.strategy.shards_optimizer:
            bad = sorted({n for one in self.strategy.world.all_gather(bad) for n in one})
        return tuple(names[n] if n < len(names) else f"parameter {n}" for n in bad[:NAMES])

    def _scale(self, scaler: GradScaler) -> Tensor:
        """Return the scale where it is, without waiting for the device."""
        return scaler.scale(torch.ones((), device=self._device))

    def _lag(self, wanted: int | None) -> int:
        # What GradScaler asks of an optimizer: whether its kernels take `found_inf` and leave
        # weights alone by it.
        gated = self.scaler is not None or vars(self.optimizer).get(
            "_step_supports_amp_scaling", False
        )
        if wanted is None:
            return int(gated and self._device.type == "cuda")
        if wanted not in (0, 1) or (wanted and not gated):
            raise ValueError(
                f"lag = {wanted}: expected 0, or 1 with a gradient scaler or an optimizer whose fused kernels can "
                f"withhold an update on the device; this one is {type(self.optimizer).__name__}"
            )
        return wanted

    def state_dict(self) -> dict[str, Any]:
        """Return what updates have accumulated; options such as the learning rate are the config's,
        not state.

        Options that the optimizer itself has changed (a step size it has found, say) are state as
        well.

        Raises:
            NumericsError: the device had not reported on the last update, and the run has to stop
                for it.
        """
        self._guard.resolve()
        counts = {"skipped": self.skipped, "skipped_in_row": self.skipped_in_row}
        state = {"optimizer": self.strategy.state.optimizer_state(self.optimizer), **counts}
        if any(moved := changed(self._options, self.optimizer.param_groups, self._course.options)):
            state["options"] = moved
        if self.factor != 1.0:
            state["factor"] = self.factor
        if self.scaler is None:
            return state
        return state | {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; the counts of skipped updates may be missing."""
        self._guard.restart(state.get("skipped", 0), state.get("skipped_in_row", 0))
        self._stepped = set()
        if (factor := state.get("factor", 1.0)) != self.factor:
            self.factor = factor
        take_over(self.strategy, self.optimizer, self._trained, state["optimizer"])
        for group, options in zip(
            self.optimizer.param_groups, state.get("options", ()), strict=False
        ):
            group.update(options)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
