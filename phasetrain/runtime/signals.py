"""Signals that ask a run to stop, to save, or to write the stacks of its threads."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from phasetrain.errors import ExitCallError

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVING = (signal.SIGUSR1,)

REPEAT_SECONDS = 0.1
"""A repetition within this time is the same request, forwarded by a wrapper in the same process
group."""

END_SECONDS = 60
"""Time to exit after a second signal, before SIGALRM kills the process."""

STACKS_FILE = "stacks.txt"
"""File in the run folder, shared with the loader's workers."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop, without SIGHUP if it is ignored."""
    # nohup sets SIGHUP to ignored for the process it starts; a handler would undo that.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return tuple(stop_signal for stop_signal in STOPPING if stop_signal != signal.SIGHUP)
    return STOPPING


def is_in_foreground() -> bool:
    """Return whether the terminal sends its key signals to this process."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    # A job of a cluster has no terminal.
    except OSError:
        return False


class Interrupted(BaseException):
    """Raised when a stop is requested while the run waits for data, between two steps."""


class SignalExit(SystemExit):
    """Ends the process at once because of a signal."""


@contextmanager
def reject_exit() -> Iterator[None]:
    """Turn `sys.exit` in user code into an error, because with exit code 0 a scheduler would take
    the run as finished; and so KeyboardInterrupt while `Signals` catches Ctrl-C.

    Raises:
        ExitCallError: user code has called `sys.exit` or raised KeyboardInterrupt.
    """
    try:
        yield
    except SignalExit:
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if is_interrupt and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        raise ExitCallError.from_exit(error) from error


class Signals:
    """Context in which signals are caught and kept for the next step boundary.

    SIGTERM, SIGINT and SIGHUP request a save and a stop, and interrupt a wait for data; a second
    one ends the process at once, a third one even if it hangs while exiting. SIGUSR1 requests a
    save. Outside of the main thread, where Python allows no handlers, nothing is caught.

    Attributes:
        stop: number of the first signal that requested a stop, or 0.
        ended: number of the second one, or 0.
        save: whether a save is requested and has not been made.
        on_interrupt: called for each SIGINT, in the signal handler; it may only set a flag.
        reads: checks whether a stack frame reads a sample; only there `Interrupted` is raised,
            since locks may be held anywhere else.
    """

    def __init__(self) -> None:
        self.stop = self.ended = 0
        self.save = False
        self.on_interrupt: Callable[[], None] = lambda: None
        self.reads: Callable[[FrameType | None], bool] = lambda frame: False
        self._first = 0.0
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    @property
    def stop_name(self) -> str:
        """Name of the signal that asked to stop, such as SIGTERM."""
        return signal.Signals(self.stop).name

    def __enter__(self) -> "Signals":
        # Python sets handlers in the main thread only; a run in another thread has no signals.
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._on_stop)
            for number in SAVING:
                self._before[number] = signal.signal(number, self._on_save)
        return self

    def __exit__(self, *error: object) -> None:
        if self.ended:
            # The process has got out by itself: no SIGALRM is needed to end it.
            signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.on_interrupt()
        # A closed terminal sends SIGHUP twice, from its shell and from the kernel.
        if self.stop and number == signal.SIGHUP:
            return
        if self.ended:  # the exit itself hangs: skip finally blocks and atexit handlers
            os._exit(128 + number)
        if self.stop:
            if self._is_forwarded(number):
                return
            self.ended = number
            # The kernel's default action for SIGALRM works even if Python never runs again.
            signal.alarm(END_SECONDS)
            raise SignalExit(128 + number)
        self.stop = number
        self._first = time.monotonic()
        if self.reads(frame):
            raise Interrupted(self.stop_name)

    def _is_forwarded(self, number: int) -> bool:
        # A shell forwards its SIGHUP as SIGTERM.
        soon = time.monotonic() - self._first < REPEAT_SECONDS
        hung_up = self.stop == signal.SIGHUP
        return soon and (number == self.stop or (hung_up and number == signal.SIGTERM))

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True


@contextmanager
def stacks_on_signal(path: str) -> Iterator[None]:
    """Append the stacks of all threads to the file `path` whenever SIGUSR2 arrives.

    A file that is still empty at the end is deleted.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            # In C, so that it works while the interpreter hangs.
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
            try:
                yield
            finally:
                faulthandler.unregister(signal.SIGUSR2)
    finally:
        with suppress(FileNotFoundError):  # another process has deleted it
            if not Path(path).stat().st_size:
                Path(path).unlink()
