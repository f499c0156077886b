"""The effect of an exception in a hook (`HOOKS.*.on_exception`)."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar

from phasetrain.errors import ConfigError

log = logging.getLogger(__name__)

R = TypeVar("R")

OnException = Literal["raise", "stop", "ignore"]
"""`raise`: the run ends with the error. `stop`: the run saves and stops, and can be resumed.
`ignore`: a warning is logged once, and the hook is called again at the next event."""


class Stoppable(Protocol):
    """A run that can be asked to stop."""

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Request a stop at the next step boundary."""
        ...


class HookErrorGuard:
    """Catches the exceptions of one hook, and keeps the run going or stops it.

    Args:
        label: label of the hook.
        policy: `stop` or `ignore`.
    """

    def __init__(self, label: str, policy: OnException) -> None:
        self._label = label
        self._policy = policy
        self._failures = 0

    def guard_call(
        self, call: Callable[..., R], *, at_start: bool = False
    ) -> Callable[..., R | None]:
        """Wrap an event of the hook so that it raises nothing.

        Args:
            call: the event.
            at_start: let a ConfigError through, because nothing is lost before the first step.
        """

        @wraps(call)
        def guarded(run: Stoppable, *args: Any) -> R | None:
            try:
                return call(run, *args)
            # KeyboardInterrupt and SystemExit end the run, whatever the policy.
            except Exception as error:
                if at_start and isinstance(error, ConfigError):
                    raise
                self._report_failure(error)
                if self._policy == "stop":
                    reason = f"an error in HOOKS.{self._label} ({_format_error(error)})"
                    # As after a signal, the run saves its state and the same command resumes it.
                    run.stop(reason, interrupted=True)
                return None

        return guarded

    def close(self, close: Callable[[], None]) -> None:
        """Close the hook, and log the number of its failures."""
        try:
            close()
        except Exception as error:  # noqa: BLE001 - the run is over, nothing is left to protect
            self._report_failure(error)
        if self._failures > 1:
            log.warning("HOOKS.%s failed %d times", self._label, self._failures)

    def _report_failure(self, error: Exception) -> None:
        self._failures += 1
        # A hook that fails at every step would flood the terminal: one warning, then debug lines.
        if self._failures == 1:
            effect = "the run continues" if self._policy == "ignore" else "the run stops"
            log.warning(
                "HOOKS.%s failed: %s; %s (on_exception = %r)",
                self._label,
                _format_error(error),
                effect,
                self._policy,
            )
        log.debug("HOOKS.%s failed", self._label, exc_info=error)


def _format_error(error: Exception) -> str:
    """Return type and message on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
