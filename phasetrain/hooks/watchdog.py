"""Writes down what every thread is doing when no step completes for long (hook `watchdog`)."""

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
    """Appends the stacks of all threads to `stacks.txt` in the run folder when no step completes in
    time.

    The run goes on; whoever reads the warning decides. A timer in C does the writing, so that it
    works in a process that hangs with the interpreter's lock held.

    Args:
        seconds: how long a step, the wait for its batch included, may take.
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
        """Start to watch."""
        if run.folder is None or not run.folder.storage.keeps_files:
            return
        self._file = open(run.folder.file("stacks.txt"), "a", encoding="utf-8")  # noqa: SIM115 - stays open
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="phasetrain-watchdog", daemon=True)
        self._thread.start()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Note that something moves."""
        self._steps += 1

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Note that something moves."""
        self._steps += 1

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self.seconds, file=self._file or 2)

    def _watch(self) -> None:
        """Set the timer back as long as steps complete; say once for each stall that they do
        not."""
        seen = self._steps
        waited = 0.0
        pause = self.seconds / 8
        told = False
        while not self._closing.wait(pause):
            if self._steps != seen:
                seen = self._steps
                waited = 0.0
                told = False
                self._arm()
                continue
            waited += pause
            if waited >= self.seconds and not told:
                told = True
                log.warning(
                    "no step has completed in %g s; what every thread does is in stacks.txt",
                    self.seconds,
                )
