"""Counts updates that are not finite, and undoes their changes to buffers and other state."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from phasetrain.errors import NumericsError
from phasetrain.optim.update.nonfinite import GuardSettings, NonFinite, format_error

log = logging.getLogger(__name__)

FIRST_WARNINGS = 3
WARN_EVERY = 100
"""Skipped updates that are logged as warnings: the first ones, then every hundredth."""


OnSkip = Callable[[NonFinite], None]
"""Called for an update that was not made; fills in its position and samples, may dump the step."""


def ignore_skip(found: NonFinite) -> None:
    """Do nothing about a skipped update."""


class NonFiniteGuard:
    """Counts skipped updates, warns about them, and ends the run if there are too many.

    Args:
        settings: policy.

    Attributes:
        watches: whether updates are checked at all.
        restore_point: tensors that a skipped update must leave as they were.
        saves: whether there are any, to be copied before each update.
        skipped: updates skipped in the run, as far as the device has reported.
        in_row: updates skipped since the last one that was made, as far as the device has reported.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.watches = settings.on_nonfinite != "ignore"
        self.restore_point = RestorePoint(settings.buffers)
        self.skipped = 0
        self.in_row = 0
        self.saves = self.watches and bool(settings.buffers())
        self._pending: PendingVerdict | None = None
        # Kept because the error of a deferred verdict surfaces after the position has moved on: a
        # final checkpoint must not be written as if nothing had happened.
        self._failed: NumericsError | None = None

    def protect(self, lookup: Callable[[], Sequence[Tensor]]) -> None:
        """Restore these tensors, too, if an update is skipped."""
        self.restore_point.include(lookup)
        self.saves = self.watches

    def skip(
        self,
        loss: float,
        gradients: tuple[str, ...] | None,
        on_skip: OnSkip,
        scale: float | None = None,
    ) -> None:
        """Count an update that was not made.

        Raises:
            NumericsError: the run has to stop; nothing is counted then, because the update is not
                complete.
        """
        stops = self.would_stop(scaled=scale is not None)
        nonfinite = NonFinite(loss, gradients, self.in_row + 1, scale, stops)
        # Before raising: the hook dumps the step and fills in update and samples for the message.
        on_skip(nonfinite)
        if nonfinite.stops:
            raise NumericsError(format_error(nonfinite, self.settings))
        self.skipped += 1
        self.in_row += 1
        if scale is not None:  # a scaler works by overflowing now and then: no reason to warn
            log.debug("%s; the gradient scale is now %g", nonfinite, scale)
        elif self.skipped <= FIRST_WARNINGS or self.skipped % WARN_EVERY == 0:
            log.warning(
                "%s: skipped (%d in a row, %d in total)", nonfinite, self.in_row, self.skipped
            )

    def would_stop(self, *, scaled: bool) -> bool:
        """Check whether one more skipped update ends the run."""
        settings = self.settings
        return self.in_row >= settings.skip_budget or (
            settings.on_nonfinite == "stop" and not scaled
        )

    def defer(
        self, flag: Tensor, loss: Tensor, on_skip: OnSkip, scale: Tensor | None = None
    ) -> None:
        """Keep the verdict on an update until the device has reported it."""
        self._pending = PendingVerdict(flag, loss, on_skip, scale)

    def resolve(self) -> None:
        """Read the verdict on the previous update, if it is still pending.

        Raises:
            NumericsError: the run has to stop for it; raised again on each call, because the
                position has already moved past that update.
        """
        if self._failed is not None:
            raise self._failed
        pending = self._pending
        if pending is None:
            return
        self._pending = None
        bad, loss, scale = pending.read()
        if not bad:
            self.in_row = 0
            return
        try:
            self.skip(loss, None, pending.on_skip, scale)
        except NumericsError as error:
            self._failed = error
            raise

    def restart(self, skipped: int, in_row: int) -> None:
        """Load the counts of a checkpoint; a pending verdict belongs to the abandoned run."""
        self.skipped = skipped
        self.in_row = in_row
        self._pending = None
        self._failed = None


class PendingVerdict:
    """A verdict on its way from the device to the host.

    Args:
        flag: 1 if the update was skipped, 0-d.
        loss: loss of the update, 0-d.
        on_skip: called if it was.
        scale: gradient scale after the update, 0-d, or None.
    """

    def __init__(self, flag: Tensor, loss: Tensor, on_skip: OnSkip, scale: Tensor | None) -> None:
        self.on_skip = on_skip
        self._scaled = scale is not None
        if scale is None:
            scale = flag  # keeps the verdict at three values; `read` ignores the third
        values = [flag, loss.detach(), scale]
        # Stacked, so that a single copy to the host brings the whole verdict.
        verdict = torch.stack([value.to(flag.device, torch.float32) for value in values])
        self._event: torch.cuda.Event | None = None
        if verdict.is_cuda:
            # A copy and an event in the stream: reading later waits for this update and not for
            # the next one, which is queued by then.
            self._host = torch.empty(len(values), pin_memory=True)
            self._host.copy_(verdict, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = verdict

    def read(self) -> tuple[bool, float, float | None]:
        """Return whether the update was skipped, its loss, and the scale; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        flag, loss, scale = self._host.tolist()
        if not self._scaled:
            return flag != 0, loss, None
        return flag != 0, loss, scale


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
        if list(map(_layout_of, now)) != list(map(_layout_of, self._copies)):
            self._copies = [tensor.clone() for tensor in now]
        elif now:
            # As bytes: only tensors of one type are copied by a single kernel.
            torch._foreach_copy_(_view_bytes(self._copies), _view_bytes(now))

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
        groups: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for now, copy in self._pairs():
            if _layout_of(now) == _layout_of(copy):
                groups.setdefault(now.device, []).append((now, copy))
            elif now.shape == copy.shape:
                # `where` on the device instead of an `if` on the host, which would have to read the
                # flag.
                now.copy_(torch.where(flag.to(now.device) != 0, copy, now))
        for device, pairs in groups.items():
            # All at once: for each tensor by itself, a kernel takes longer to start than to run.
            current, saved = map(_view_bytes, zip(*pairs, strict=True))
            chosen = torch.where(flag.to(device) != 0, torch.cat(saved), torch.cat(current))
            torch._foreach_copy_(current, torch.split(chosen, [len(view) for view in current]))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        # A parameter may be among them, and autograd forbids writing to a leaf in place.
        now = [tensor.detach() if tensor.requires_grad else tensor for tensor in self._lookup()]
        return list(zip(now, self._copies, strict=False))


def _layout_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _view_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the memory of tensors without gaps, such as copies and what has their layout."""
    return [torch.as_strided(t, (t.numel(),), (1,)).view(torch.uint8) for t in tensors]


def choose_lag(
    optimizer: Optimizer, scaler: GradScaler | None, guard: GuardSettings, device: torch.device
) -> int:
    """Return the number of updates by which the verdict on an update comes late.

    Raises:
        ValueError: a lag that the optimizer does not support.
    """
    # What GradScaler asks of an optimizer, too: whether its kernels leave the weights alone by
    # `found_inf`.
    can_lag = scaler is not None or vars(optimizer).get("_step_supports_amp_scaling", False)
    # With `ignore` nobody reads a verdict, so nothing may be deferred either.
    if guard.on_nonfinite == "ignore":
        return 0
    if guard.lag is None:
        return int(can_lag and device.type == "cuda")
    if guard.lag not in (0, 1) or (guard.lag and not can_lag):
        raise ValueError(
            f"lag = {guard.lag}: expected 0, or 1 with a gradient scaler or an optimizer whose "
            f"fused kernels can withhold an update on the device; this is "
            f"{type(optimizer).__name__}"
        )
    return guard.lag
