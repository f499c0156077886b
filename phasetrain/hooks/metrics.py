"""Writes metrics.jsonl: one JSON object per logged step and per phase, each step once after any
number of resumes."""

import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.runtime.storage import LogFile

log = logging.getLogger(__name__)


@HOOKS.register("metrics")
class Metrics(Hook):
    """Appends to `metrics.jsonl` in the run folder.

    Everything that may differ between two equal runs stands under `time`. A resumed run cuts the
    file back to what the checkpoint covers.

    Args:
        every_updates: log a train step after each so many updates.
    """

    observe_only = True
    main_only = False  # how long a process waits for data is asked of all; the main one writes
    single = True

    def __init__(self, every_updates: int = 10) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.every_updates = every_updates
        self._file: LogFile | None = None
        self._warned = False
        self._offset = 0
        self._since: tuple[float, int, float] = (0.0, 0, 0.0)
        self._phase_began = 0.0

    def on_start(self, run: Run) -> None:
        """Open the file and cut off what lies beyond the checkpoint."""
        assert run.folder is not None, "the metrics hook needs a run folder"
        if not run.world.is_main:
            return
        self._file = run.folder.log("metrics.jsonl")
        size = self._file.size
        path = self._file.path
        if size < self._offset:
            log.warning(
                "%s has %d bytes, the checkpoint covers %d: earlier lines are lost",
                path,
                size,
                self._offset,
            )
            self._offset = self._file.read().rfind(b"\n") + 1
        self._file.truncate(self._offset)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Start the clock of the phase."""
        self._phase_began = time.perf_counter()
        self._since = (self._phase_began, run.state.samples, run.clock.seconds()["data"])

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Log the step if it is due; the only moment at which the loss is read from the device."""
        state = run.state
        if not phase.is_train or state.updates % self.every_updates:
            return
        now, waited, (then, samples, before) = (
            time.perf_counter(),
            run.clock.seconds()["data"],
            self._since,
        )
        self._since = now, state.samples, waited
        longest = run.world.all_reduce_max(waited - before)
        if self._file is None:
            return
        spent = {
            "samples_per_second": (state.samples - samples) / max(now - then, 1e-9),
            "data_seconds": longest,
        }
        self.record(
            {
                "kind": "step",
                "updates": state.updates,
                "phase": phase.index,
                "split": phase.split,
                "epoch": phase.epoch,
                "step": state.step,
                "samples": state.samples,
                "loss": _number(float(out.loss)),
                "lr": run.task.updater.lr,
                **(
                    {"logs": {name: _number(float(value)) for name, value in out.logs.items()}}
                    if out.logs
                    else {}
                ),
                "time": {"at": time.time(), **spent},
            }
        )

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the phase."""
        self.record(
            {
                "kind": "phase",
                "phase": phase.index,
                "split": phase.split,
                "epoch": phase.epoch,
                "updates": run.state.updates,
                "metrics": {name: _number(value) for name, value in metrics.items()},
                "time": {"at": time.time(), "seconds": time.perf_counter() - self._phase_began},
            }
        )

    def on_save(self, run: Run) -> None:
        """Hand every line to the system; it is made durable before the checkpoint is."""
        self._flush()

    def close(self) -> None:
        """Hand over what is left; lines that no checkpoint covers stay, for whoever looks for a
        cause."""
        self._flush()

    def state_dict(self) -> dict[str, Any]:
        """Return how far into the file a checkpoint covers, in bytes."""
        return {"offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the offset; the file is cut at `on_start`."""
        self._offset = int(state["offset"])

    def record(self, record: dict[str, Any]) -> None:
        """Append a record of a kind of its own; what may differ between equal runs belongs under
        `time`."""
        if self._file is None:  # another process writes
            return
        line = (json.dumps(record) + "\n").encode()
        self._file.write(line)
        self._offset += len(line)

    def _flush(self) -> None:
        error = None if self._file is None else self._file.flush()
        if error is not None and not self._warned:
            log.warning(
                "metrics.jsonl cannot be written now: %s; lines are kept in memory until it can",
                error,
            )
        self._warned = error is not None


def _number(value: float) -> float | str:
    """Return a number as JSON can hold it; the non-finite ones as text."""
    if math.isfinite(value):
        return value
    return repr(value)
