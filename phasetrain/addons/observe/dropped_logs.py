"""Warns of numbers that a hook logs in an event that belongs to no step."""

import logging
import sys
from types import FrameType

from torch import nn

from phasetrain.engine.step_logs import on_dropped
from phasetrain.hooks.base import current_run
from phasetrain.hooks.dispatch import call_seeded

log = logging.getLogger(__name__)

MODULE_CALL = nn.Module._call_impl.__code__


def warn_of_dropped_logs() -> None:
    """Let `phasetrain.log` warn, once for each event of a hook, of numbers that nothing takes; call
    this when a run begins.

    Logs of a module that a hook calls are left out: it may run outside of steps.
    """
    warned: set[tuple[str, str]] = set()

    def warn() -> None:
        if current_run.get() is None:  # the run has ended
            return
        source = _find_event()
        if source is None or source in warned:
            return
        warned.add(source)
        label, event = source
        log.warning(
            "HOOKS.%s: what phasetrain.log gets in %s is lost, because the step has not begun or "
            "is complete; log it in on_batch, on_forward or on_update, or add a metric of the "
            "phase to `metrics` in on_metrics",
            label,
            event,
        )

    on_dropped.set(warn)


def _find_event() -> tuple[str, str] | None:
    """Return label and event of the hook whose code logs; None if a module that it calls does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        if frame.f_code is call_seeded.__code__:
            return frame.f_locals["label"], frame.f_locals["event"]
        frame = frame.f_back
    return None
