"""Dumps the stacks of all threads when no step completes in time (hook `watchdog`), and writes the
heartbeat that a supervisor reads (LAUNCH.supervise)."""

import faulthandler
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.runtime.child_processes import HEARTBEATS

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
"""Interval of the heartbeats of a supervised process."""


@HOOKS.register("watchdog")
class Watchdog(Hook):
    """Appends the stacks of all threads to `stacks.txt`, and warns, if no step completes in time;
    SIGUSR2 writes them on demand.

    The hook does not stop the run; LAUNCH.supervise does. faulthandler writes the stacks from a C
    thread, which works even if the process hangs while it holds the GIL.

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
        self._run: Run | None = None
        self._heartbeats = os.environ.get(HEARTBEATS, "")
        self._file: IO[str] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, run: Run) -> None:
        """Start the timer and the heartbeat."""
        self._run = run
        # faulthandler writes to a file descriptor, which an object store cannot give.
        if run.folder is not None and run.folder.storage.keeps_files:
            self._file = open(run.folder.file("stacks.txt"), "a", encoding="utf-8")  # noqa: SIM115 - stays open
            self._start_timer()
        elif not self._heartbeats:
            return
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
            self._beat()
        if self._file is not None:
            # faulthandler keeps the bare descriptor: after the close it may belong to another file.
            faulthandler.cancel_dump_traceback_later()
            self._file.close()

    def _start_timer(self) -> None:
        # Each call replaces the timer that is running.
        if self._file is not None:
            faulthandler.dump_traceback_later(self.seconds, file=self._file)

    def _beat(self) -> None:
        """Write the heartbeat, if there is a supervisor."""
        run = self._run
        if run is None or not self._heartbeats:
            return
        # Most runs have no supervisor.
        from phasetrain.addons.observe.heartbeat import Heartbeat, write_heartbeat

        folder = ""
        if run.folder is not None:
            folder = run.folder.path
        state = run.state
        with suppress(OSError):  # the supervisor has gone, and its folder with it
            write_heartbeat(
                self._heartbeats,
                Heartbeat(
                    folder, state.phase, state.step, state.updates, run.clock.kind, self._steps
                ),
            )

    def _watch_steps(self) -> None:
        """Restart the timer while steps complete, and log a warning once per stall."""
        # Restarting the timer in `on_step` would cost a system call per step.
        seen = self._steps
        waited = 0.0
        # The timer restarts with a delay of at most this, so the stacks come that much later.
        pause = self.seconds / 8
        if self._heartbeats:
            pause = min(pause, HEARTBEAT_SECONDS)
        warned = False
        self._beat()
        while not self._closing.wait(pause):
            self._beat()
            if self._steps != seen:
                seen = self._steps
                waited = 0.0
                warned = False
                self._start_timer()
                continue
            waited += pause
            if waited >= self.seconds and not warned:
                warned = True
                if self._file is not None:
                    log.warning(
                        "no step has completed in %g s; the stacks of all threads are in "
                        "stacks.txt",
                        self.seconds,
                    )
