"""What becomes of a run when one of its hooks raises (`HOOKS.*.on_exception`)."""

import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from phasetrain.errors import ConfigError

log = logging.getLogger(__name__)

R = TypeVar("R")

OnException = Literal["raise", "stop", "ignore"]
"""The run ends with the error; it is saved and stops, to be started again; or the hook is warned of
once and is told of the next event as if nothing had been."""


class Stoppable(Protocol):
    """A run, as far as it can be asked to stop."""

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Ask the run to stop at the next step boundary."""
        ...


class Guard:
    """Keeps a run going, or stops it in good order, when a hook of it raises.

    Args:
        label: of the hook.
        policy: `stop` or `ignore`.
    """

    def __init__(self, label: str, policy: OnException) -> None:
        self._label = label
        self._policy = policy
        self._failures = 0

    def around(self, call: Callable[..., R], *, at_start: bool = False) -> Callable[..., R | None]:
        """Return an event of the hook that lets no error out; at the start of a run mistakes in the
        config."""

        def guarded(run: Stoppable, *args: Any) -> R | None:
            try:
                return call(run, *args)
            except Exception as error:  # what to do about it is the policy
                if at_start and isinstance(error, ConfigError):
                    raise
                self._heard(error)
                if self._policy == "stop":
                    run.stop(
                        f"HOOKS.{self._label}, which has failed ({_told(error)})", interrupted=True
                    )
                return None

        return guarded

    def close(self, close: Callable[[], None]) -> None:
        """Close the hook, and say how often it has failed."""
        try:
            close()
        except Exception as error:  # noqa: BLE001 - what it watched is over
            self._heard(error)
        if self._failures > 1:
            log.warning("HOOKS.%s has failed %d times", self._label, self._failures)

    def _heard(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            then = "the run goes on" if self._policy == "ignore" else "the run stops"
            text = "HOOKS.%s has failed: %s; %s (on_exception = %r)"
            log.warning(text, self._label, _told(error), then, self._policy)
        log.debug("HOOKS.%s has failed", self._label, exc_info=error)


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
