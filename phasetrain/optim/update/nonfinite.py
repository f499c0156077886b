"""Keeps what is not finite away from weights and optimizer, and says which update it was."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from phasetrain.errors import NumericsError
from phasetrain.runtime.format import join_first

log = logging.getLogger(__name__)

OnNonFinite = Literal["stop", "skip", "ignore"]

NAMES = 10
IDS = 5
"""Names of gradients that are looked up, and sample ids that are shown."""

FIRST = 3
EVERY = 100
"""Skipped updates that are warned of: the first few, then one in so many."""


@dataclass(frozen=True)
class GuardSettings:
    """What is done about an update whose loss or gradient is not finite.

    Attributes:
        on_nonfinite: stop the run, skip the update, or ignore it and do not look.
        skip_budget: skipped updates in a row after which the run stops, those of a gradient scaler
            included.
        names: of the trained parameters, in the optimizer's order, for messages; empty where they
            have none.
        buffers: returns the tensors that a forward pass changes (running statistics, queues),
            looked up each time, as a module may put others in their place; an update that is not
            made leaves them as they were before it.
        lag: 0 reads the verdict before the optimizer moves. 1 lets the device withhold the update
            and reads one update later, so that nothing waits for the device. None: 1 on CUDA where
            optimizer or scaler can.
    """

    on_nonfinite: OnNonFinite = "stop"
    skip_budget: int = 20
    names: Sequence[str] = ()
    buffers: Callable[[], Sequence[Tensor]] = list
    lag: int | None = None


STOP = GuardSettings()


@dataclass
class NonFinite:
    """An update that was not made because its loss or gradient was not finite.

    Attributes:
        loss: mean over the update's samples, without the scaler's factor.
        gradients: names of parameters whose gradient has an entry that is not finite, up to 10;
            None where they were gone before the device reported.
        in_row: skipped updates in a row, this one included.
        scale: the gradient scaler's factor after this update; None without a scaler.
        stops: whether the run stops for it.
        updates: which update of the run, counted as in metrics.jsonl: the first is 1; 0 where it is
            not known.
        split, step, where: its place, see `phasetrain.tasks.Position`.
        ids: indices of its samples in their data set.
        dump: folder in which a hook has kept the step, or empty.
    """

    loss: float
    gradients: tuple[str, ...] | None
    in_row: int
    scale: float | None = None
    stops: bool = False
    updates: int = 0
    split: str = ""
    step: int = 0
    where: float = 0.0
    ids: tuple[int, ...] = ()
    dump: str = ""

    def __str__(self) -> str:
        """Return update, loss, gradients and samples as the beginning of a sentence."""
        update = f"update {self.updates}" if self.updates else "an update"
        samples = f"; samples {join_first(self.ids, IDS)}" if self.ids else ""
        return f"{update} is not finite (loss {self.loss!r}; {self._gradients()}{samples})"

    def _gradients(self) -> str:
        if self.gradients is None:
            return "its gradients were not kept"
        if self.gradients:
            return f"gradients of {', '.join(self.gradients)}"
        return "every gradient finite" + (", their norm is not" if isfinite(self.loss) else "")


Tell = Callable[[NonFinite], None]
"""Hears of an update that was not made, fills in its place and samples, and may keep the step."""


def nobody(found: NonFinite) -> None:
    """Hear of nothing."""


class Guard:
    """Counts skipped updates, warns of them and ends the run where they are too many.

    Args:
        settings: what to do.

    Attributes:
        skipped: updates skipped in the run.
        in_row: skipped since the last one that was made.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.skipped = 0
        self.in_row = 0
        self.buffers = Buffers(settings.buffers)
        self._pending: Pending | None = None
        self._failed: NumericsError | None = None

    def skip(
        self, loss: float, gradients: tuple[str, ...] | None, tell: Tell, scale: float | None = None
    ) -> None:
        """Count an update that was not made.

        Raises:
            NumericsError: the run has to stop for it; nothing is counted then, as the update is not
                complete.
        """
        found = NonFinite(
            loss, gradients, self.in_row + 1, scale, self.would_stop(scaled=scale is not None)
        )
        tell(found)
        if found.stops:
            raise NumericsError(self._sentence(found))
        self.skipped += 1
        self.in_row += 1
        if scale is not None:  # lowering the scale until nothing overflows is what a scaler is for
            log.debug("%s; the gradient scale is now %g", found, scale)
        elif self.skipped <= FIRST or self.skipped % EVERY == 0:
            log.warning("%s: skipped; in a row %d, in all %d", found, self.in_row, self.skipped)

    def would_stop(self, *, scaled: bool) -> bool:
        """Tell whether one more skipped update ends the run."""
        settings = self.settings
        return self.in_row >= settings.skip_budget or (
            settings.on_nonfinite == "stop" and not scaled
        )

    def wait_for(self, flag: Tensor, loss: Tensor, tell: Tell, scale: Tensor | None = None) -> None:
        """Keep the verdict on an update until the device has reported it."""
        self._pending = Pending(flag, loss, tell, scale)

    def resolve(self) -> None:
        """Read the verdict on the update before, if it is still out.

        Raises:
            NumericsError: the run has to stop for it; again each time, because the position has
                moved past it.
        """
        if self._failed is not None:
            raise self._failed
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        bad, loss, scale = pending.read()
        if not bad:
            self.in_row = 0
            return
        try:
            self.skip(loss, None, pending.tell, scale)
        except NumericsError as error:
            self._failed = error
            raise

    def restart(self, skipped: int, in_row: int) -> None:
        """Take over counts; whatever was pending belongs to another past."""
        self.skipped = skipped
        self.in_row = in_row
        self._pending = self._failed = None

    def _sentence(self, found: NonFinite) -> str:
        settings = self.settings
        kept = f"; the step is kept in {found.dump}" if found.dump else ""
        if found.updates:
            look = f"; look at it with RUN.engine=replay RUN.step={found.updates}"
        else:
            look = ""
        if settings.on_nonfinite == "stop" and found.scale is None:
            return (
                f"OPTIMIZER.on_nonfinite = 'stop': {found}, and the weights are as they were before it{kept}{look}. "
                "To leave such updates out, set OPTIMIZER.on_nonfinite=skip and "
                "RUN.allow=[OPTIMIZER.on_nonfinite]"
            )
        if found.scale is None:
            scale = ""
        else:
            scale = f", and the gradient scale has come down to {found.scale:g}"
        return (
            f"OPTIMIZER.skip_budget = {settings.skip_budget}: {found.in_row} updates in a row were skipped{scale}; "
            f"the last one: {found}{kept}{look}. Mend the data, lower OPTIMIZER.lr or clip the gradients; a higher "
            "OPTIMIZER.skip_budget goes on from the last checkpoint"
        )


class Pending:
    """A verdict on its way from the device to the host.

    Args:
        flag: 1 where the update was withheld, 0-d.
        loss: of the update, 0-d.
        tell: hears of it.
        scale: of the gradient scaler after the update, 0-d, or None.
    """

    def __init__(self, flag: Tensor, loss: Tensor, tell: Tell, scale: Tensor | None) -> None:
        self.tell = tell
        self._scaled = scale is not None
        values = [flag, loss.detach(), flag if scale is None else scale]
        verdict = torch.stack([value.to(flag.device, torch.float32) for value in values])
        self._event: torch.cuda.Event | None = None
        if verdict.is_cuda:
            # A copy and an event in the stream: reading later waits for this update and not for the
            # next one.
            self._host = torch.empty(len(values), pin_memory=True)
            self._host.copy_(verdict, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = verdict

    def read(self) -> tuple[bool, float, float | None]:
        """Return whether the update was withheld, its loss, and the scale; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        flag, loss, scale = self._host.tolist()
        return flag != 0, loss, scale if self._scaled else None


class FiniteCheck:
    """Looks for entries that are not finite, in as few kernels as torch allows.

    The kernel is the one with which `torch.amp.GradScaler` unscales, here by 1. It is private to
    torch: where it is missing or refuses (several types or devices in one list, sparse gradients),
    the next of the ways is taken for good.

    Args:
        device: of most of the tensors to come.
        any_process: makes a flag that of all processes, where each looks at tensors of its own.
    """

    def __init__(
        self, device: torch.device, any_process: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._any_process = any_process
        self._flag = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._way: Callable[[list[Tensor]], object] = partial(_mark, flag=self._flag, one=self._one)
        self._others = [self._by_kind, self._by_norm]

    def mark(self, tensors: list[Tensor], *, everywhere: bool = False) -> Tensor:
        """Return a flag, float32 and 0-d, that is 1 where an entry of `tensors` is not finite.

        It is the same tensor each time and stays 1 until `reset`.

        Args:
            tensors: what to look at.
            everywhere: of any process; all of them take part.
        """
        try:
            self._way(tensors)
        except (AttributeError, RuntimeError):
            if not self._others:
                raise
            self._way = self._others.pop(0)
            self.mark(tensors)
        if everywhere and self._any_process is not None:
            self._any_process(self._flag)
        return self._flag

    def finite(self, tensors: list[Tensor]) -> bool:
        """Tell whether every entry of `tensors` is finite, on all processes; waits for the
        device."""
        if self.mark(tensors, everywhere=True).item():
            self.reset()
            return False
        return True

    def reset(self) -> None:
        """Lower the flag."""
        self._flag.zero_()

    def _by_kind(self, tensors: list[Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for (device, _), group in kinds.items():
            flag = torch.zeros((), device=device)
            _mark(group, flag, torch.ones((), device=device))
            self._flag.copy_(torch.maximum(self._flag, flag.to(self._flag.device)))

    def _by_norm(self, tensors: list[Tensor]) -> None:
        norm = get_total_norm([t.coalesce().values() if t.is_sparse else t for t in tensors])
        self._flag.copy_(torch.maximum(self._flag, (~norm.isfinite()).to(self._flag)))


def _mark(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, one)


def not_finite(tensor: Tensor) -> bool:
    """Tell whether a dense or sparse tensor has an entry that is not finite; waits for the
    device."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return not bool(values.isfinite().all())


class Buffers:
    """What a forward pass changes beside the weights, kept so that an update that is not made
    leaves it as it was.

    Args:
        tensors: returns what forward passes change, in place or by another tensor in its place.
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor]]) -> None:
        self._now = tensors
        self._kept: list[Tensor] = []

    def add(self, tensors: Callable[[], Sequence[Tensor]]) -> None:
        """Look after these tensors, too; they are looked up each time."""
        before = self._now
        self._now = lambda: [*before(), *tensors()]

    def keep(self) -> None:
        """Take a copy."""
        now = [tensor.detach() for tensor in self._now()]
        if [(t.shape, t.dtype) for t in now] != [(t.shape, t.dtype) for t in self._kept]:
            self._kept = [tensor.clone() for tensor in now]
        elif now:
            torch._foreach_copy_(self._kept, now)

    def restore(self) -> None:
        """Put the copy back."""
        for now, kept in self._pairs():
            if now.shape == kept.shape:
                now.copy_(kept)
            else:
                now.data = kept.clone()

    def restore_where(self, flag: Tensor) -> None:
        """Put the copy back where `flag` is 1, without waiting for the device; shapes must be what
        they were."""
        for now, kept in self._pairs():
            if now.shape == kept.shape:
                now.copy_(torch.where(flag.to(now.device) != 0, kept, now))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        now = [tensor.detach() if tensor.requires_grad else tensor for tensor in self._now()]
        return list(zip(now, self._kept, strict=False))
