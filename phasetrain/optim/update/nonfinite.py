"""The policy for updates whose loss or gradient is not finite (OPTIMIZER.on_nonfinite)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from phasetrain.config.engines import list_engines
from phasetrain.errors import NumericsError
from phasetrain.optim.update.restore_point import RestorePoint
from phasetrain.runtime.format import join_first

log = logging.getLogger(__name__)

OnNonFinite = Literal["stop", "skip", "ignore"]

MAX_NAMES = 10
"""Names of gradients that a message lists."""

MAX_IDS = 5
"""Sample ids that a message lists."""

CLEAN_DATA = "remove or replace these values in the dataset or by a transform"
"""Advice where input or target of a sample is not finite."""

FIRST_WARNINGS = 3
WARN_EVERY = 100
"""Skipped updates that are logged as warnings: the first ones, then every hundredth."""


@dataclass(frozen=True)
class GuardSettings:
    """How updates that are not finite are handled.

    Attributes:
        on_nonfinite: stop the run, skip the update, or ignore it without checking.
        skip_budget: maximum number of updates skipped in a row before the run fails; includes
            those that a gradient scaler skips.
        names: names of the trained parameters in the optimizer's order, for messages; empty if
            unknown.
        buffers: returns the tensors that a forward pass changes (running statistics, queues). It is
            called each time, because a module may replace them; a skipped update restores them.
        lag: 0 reads the verdict before the optimizer steps. 1 lets the device withhold the update
            and reads the verdict one update later, so that nothing waits for the device. None: 1 on
            CUDA if the optimizer or the scaler supports it.
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
        gradients: names of parameters whose gradient is not finite, at most 10; None if the
            gradients were gone by the time the device reported.
        in_row: updates skipped in a row, including this one.
        scale: gradient scale after this update; None without a scaler.
        stops: whether the run fails because of it.
        updates: number of the update in the run, counted from 1 as in metrics.jsonl; 0 if unknown.
        split, step, where: position of the update, see `phasetrain.tasks.Position`.
        ids: indices of its samples in their dataset.
        bad_inputs, bad_targets: indices of the ones whose input or target is not finite.
        dump: folder to which a hook has written the step, or empty.
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
    bad_inputs: tuple[int, ...] = ()
    bad_targets: tuple[int, ...] = ()

    @property
    def has_bad_data(self) -> bool:
        """Whether the data itself is not finite, so that no other setting would help."""
        return bool(self.bad_inputs or self.bad_targets)

    def __str__(self) -> str:
        """Return update, loss, gradients and samples as the beginning of a sentence."""
        update = "an update"
        if self.updates:
            update = f"update {self.updates}"
        samples = ""
        if self.ids:
            samples = f"; samples {join_first(self.ids, MAX_IDS)}"
        for name, bad in (("input", self.bad_inputs), ("target", self.bad_targets)):
            if bad:
                samples += (
                    f"; the {name} has NaN or infinite values in {len(bad)} of {len(self.ids)} "
                    f"samples: {join_first(bad, MAX_IDS)}"
                )
        return f"{update} is not finite (loss {self.loss!r}; {self._describe_gradients()}{samples})"

    def _describe_gradients(self) -> str:
        if self.gradients is None:
            return "its gradients were not saved"
        if self.gradients:
            return f"gradients of {', '.join(self.gradients)}"
        if isfinite(self.loss):
            return "every gradient is finite, but their norm is not"
        return "every gradient is finite"


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
        found = NonFinite(loss, gradients, self.in_row + 1, scale, stops)
        # Before raising: the hook dumps the step and fills in update and samples for the message.
        on_skip(found)
        if found.stops:
            raise NumericsError(self._format_error(found))
        self.skipped += 1
        self.in_row += 1
        if scale is not None:  # a scaler works by overflowing now and then: no reason to warn
            log.debug("%s; the gradient scale is now %g", found, scale)
        elif self.skipped <= FIRST_WARNINGS or self.skipped % WARN_EVERY == 0:
            log.warning("%s: skipped (%d in a row, %d in total)", found, self.in_row, self.skipped)

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

    def _format_error(self, found: NonFinite) -> str:
        settings = self.settings
        place = ""
        if found.dump:
            place = f"; the step is saved in {found.dump}"
        if found.updates and "replay" in list_engines():
            place += f"; inspect it with RUN.engine=replay RUN.step={found.updates}"
        if settings.on_nonfinite == "stop" and found.scale is None:
            advice = (
                "To skip such updates, set OPTIMIZER.on_nonfinite=skip and "
                "RUN.allow=OPTIMIZER.on_nonfinite"
            )
            if found.has_bad_data:
                advice = f"To go on, {CLEAN_DATA}"
            return (
                f"OPTIMIZER.on_nonfinite = 'stop': {found}; the weights are those before the "
                f"update{place}. {advice}"
            )
        scale = ""
        if found.scale is not None:
            scale = f", and the gradient scale has fallen to {found.scale:g}"
        advice = (
            "Fix the data, lower OPTIMIZER.lr or clip the gradients; with a higher "
            "OPTIMIZER.skip_budget the run resumes from the last checkpoint"
        )
        if found.has_bad_data:
            advice = f"To go on, {CLEAN_DATA}"
        return (
            f"OPTIMIZER.skip_budget = {settings.skip_budget}: {found.in_row} updates in a row were "
            f"skipped{scale}; the last one: {found}{place}. {advice}"
        )


class PendingVerdict:
    """A verdict on its way from the device to the host.

    Args:
        flag: 1 if the update was withheld, 0-d.
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
        """Return whether the update was withheld, its loss, and the scale; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        flag, loss, scale = self._host.tolist()
        if not self._scaled:
            return flag != 0, loss, None
        return flag != 0, loss, scale
