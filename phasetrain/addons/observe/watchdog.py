"""Dumps the stacks of all threads when no step completes in time (hook `watchdog`)."""

import faulthandler
import logging
import threading
from collections.abc import Mapping
from typing import IO

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run

log = logging.getLogger(__name__)


@HOOKS.register("watchdog")
class Watchdog(Hook):
    """Appends the stacks of all threads to `stacks.txt`, and warns, if no step completes in time;
    SIGUSR2 writes them on demand.

    The run is not stopped. faulthandler writes the stacks from a C thread, which works even if the
    process hangs while it holds the GIL.

    Args:
        seconds: maximum duration of a step, including the wait for its batch.
    """

    observe_only = True
    main_only = False
    single = True

    def __init__(self, seconds: float = 1800.0) -> None:
        if seconds <= 0:
            raise ValueError(f"seconds = {seconds}: expected more than 0")
        self.seconds = seconds
        self._steps = 0
        self._file: IO[str] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, run: Run) -> None:
        """Start the timer."""
        # faulthandler writes to a file descriptor, which an object store cannot give.
        if run.folder is None or not run.folder.storage.keeps_files:
            return
        self._file = open(run.folder.file("stacks.txt"), "a", encoding="utf-8")  # noqa: SIM115 - stays open
        self._start_timer()
        self._thread = threading.Thread(
            target=self._watch_steps, name="phasetrain-watchdog", daemon=True
        )
        self._thread.start()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Count progress."""
        self._steps += 1

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Count progress."""
        self._steps += 1

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread is not None:
            # First of all, since the thread may restart the timer until it ends.
            self._thread.join()
        if self._file is not None:
            # faulthandler keeps the bare descriptor: after the close it may belong to another file.
            faulthandler.cancel_dump_traceback_later()
            self._file.close()

    def _start_timer(self) -> None:
        # Each call replaces the timer that is running.
        faulthandler.dump_traceback_later(self.seconds, file=self._file or 2)

    def _watch_steps(self) -> None:
        """Restart the timer while steps complete, and log a warning once per stall."""
        # Restarting the timer in `on_step` would cost a system call per step.
        seen = self._steps
        waited = 0.0
        # The timer restarts with a delay of at most this, so the stacks come that much later.
        pause = self.seconds / 8
        warned = False
        while not self._closing.wait(pause):
            if self._steps != seen:
                seen = self._steps
                waited = 0.0
                warned = False
                self._start_timer()
                continue
            waited += pause
            if waited >= self.seconds and not warned:
                warned = True
                log.warning(
                    "no step has completed in %g s; the stacks of all threads are in stacks.txt",
                    self.seconds,
                )
