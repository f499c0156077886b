"""What the outside world asks of a run: to stop, or to save."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVING = (signal.SIGUSR1,)

REPEAT_SECONDS = 0.1
"""A signal so soon after the first of its kind is the same request, passed on by a wrapper in the
same group."""

END_SECONDS = 60
"""After a second signal the kernel ends a process that has not found its way out by then."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop: SIGHUP is none of them where it is ignored.

    A closed terminal sends it, often twice: its shell does, and the kernel. `nohup` ignores it, for
    all that it starts.
    """
    return tuple(
        one for one in STOPPING if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN
    )


class Interrupted(BaseException):
    """Somebody asked to stop while the run waited for data; it stands between two steps."""


class Signals:
    """Notes signals for the next step boundary, as a context in which they are caught.

    SIGTERM, SIGINT and SIGHUP ask to save and stop, and cut a wait for data short; a second one
    ends the process at once, a third one even if it hangs on its way out. A SIGHUP is never a
    second one, and is left ignored where it is, as under nohup. SIGUSR1 asks to save and go on.
    Outside of the main thread, where Python allows no handlers, nothing is caught.

    Attributes:
        stop: number of the first signal that asked to stop, or 0.
        ended: number of the second one, at which the process ends, or 0.
        save: whether a save was asked for and is still to come.
        reads: tells of the frame at which a signal found the main thread whether it reads a sample
            there, so that `Interrupted` may be raised; nowhere else, as locks may be held.
    """

    def __init__(self) -> None:
        self.stop = self.ended = 0
        self.save = False
        self.reads: Callable[[FrameType | None], bool] = lambda frame: False
        self._first = 0.0
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    @property
    def stop_name(self) -> str:
        """Name of the signal that asked to stop, such as SIGTERM."""
        return signal.Signals(self.stop).name

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._on_stop)
            for number in SAVING:
                self._before[number] = signal.signal(number, self._on_save)
        return self

    def __exit__(self, *error: object) -> None:
        if self.ended:
            signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop and number == signal.SIGHUP:
            return
        if self.ended:
            os._exit(128 + number)
        if self.stop:
            if self._is_passed_on(number):
                return
            self.ended = number
            signal.alarm(END_SECONDS)
            raise SystemExit(128 + number)
        self.stop = number
        self._first = time.monotonic()
        if self.reads(frame):
            raise Interrupted(self.stop_name)

    def _is_passed_on(self, number: int) -> bool:
        soon = time.monotonic() - self._first < REPEAT_SECONDS
        hung_up = self.stop == signal.SIGHUP
        return soon and (number == self.stop or (hung_up and number == signal.SIGTERM))

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True
