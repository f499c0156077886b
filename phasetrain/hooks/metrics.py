"""Metrics in files and results: metrics.jsonl with one JSON object per logged step and per phase,
and the latest values."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.meters.base import metric_directions
from phasetrain.runs.records import METRICS
from phasetrain.runtime.storage import LogFile


@HOOKS.register("metrics")
class Metrics(Hook):
    """Appends to `metrics.jsonl` in the run folder, each step once after any number of resumes.

    Values that may differ between equal runs are under `time`. A resumed run truncates the file to
    the part that the checkpoint covers. Phase lines record the `directions` of their metrics: which
    values are better, as their meters declare.

    Args:
        every_updates: number of updates between two logged train steps.
    """

    observe_only = True
    main_only = False  # all ranks report how long they waited for data; rank 0 writes
    single = True

    def __init__(self, every_updates: int = 10) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.every_updates = every_updates
        self._file: LogFile | None = None
        self._offset = 0
        self._last_logged = _Reading()
        self._phase_began = 0.0

    def on_start(self, run: Run) -> None:
        """Open the file and cut off the lines beyond the checkpoint."""
        assert run.folder is not None, "the metrics hook needs a run folder"
        if not run.world.is_main:
            return
        self._file = run.folder.log(METRICS)
        # The steps after the checkpoint are repeated, and would be in the file twice.
        self._offset = self._file.truncate_lines(self._offset)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Start the clock of the phase."""
        self._last_logged = _Reading.take(run)
        self._phase_began = self._last_logged.at

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Log the step if it is due; the only moment at which the loss is read from the device."""
        state = run.state
        if not phase.is_train or state.updates % self.every_updates:
            return
        before = self._last_logged
        now = self._last_logged = _Reading.take(run)
        # a collective: every rank has to take part before all but rank 0 return
        longest_wait = run.world.all_reduce_max(now.data_seconds - before.data_seconds)
        if self._file is None:
            return
        logs = {name: _encode_number(float(value)) for name, value in out.logs.items()}
        rate = (now.samples - before.samples) / max(now.at - before.at, 1e-9)
        rates = {"samples_per_second": rate}
        if run.task.counted != "samples" and out.samples:
            rates[f"{run.task.counted}_per_second"] = rate * out.weight / out.samples
        self.record(
            {
                "kind": "step",
                **record_position(run, phase, state.step),
                "samples": state.samples,
                "loss": _encode_number(float(out.loss)),
                "lr": run.task.updater.lr,
                **({"logs": logs} if logs else {}),
                "time": {
                    "at": time.time(),
                    **rates,
                    "data_seconds": longest_wait,
                },
            }
        )

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the phase and which of their values are better."""
        self.record(
            {
                "kind": "phase",
                "phase": phase.index,
                "split": phase.split,
                "epoch": phase.epoch,
                "updates": run.state.updates,
                "metrics": {name: _encode_number(value) for name, value in metrics.items()},
                "directions": metric_directions(metrics, run.task.meters),
                "time": {"at": time.time(), "seconds": time.perf_counter() - self._phase_began},
            }
        )

    def on_save(self, run: Run) -> None:
        """Pass every line to the system; it is made durable before the checkpoint is."""
        self._flush()

    def close(self) -> None:
        """Write the remaining lines; those beyond the checkpoint stay until the next resume, as
        evidence of a failure."""
        self._flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of bytes of the file that a checkpoint covers."""
        return {"offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the offset; the file is cut at `on_start`."""
        self._offset = int(state["offset"])

    def record(self, record: dict[str, Any]) -> None:
        """Append a line; values that may differ between equal runs belong under `time`."""
        if self._file is None:  # only rank 0 writes
            return
        line = (json.dumps(record) + "\n").encode()
        self._file.write(line)
        self._offset += len(line)

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush_or_warn()


def record_line(run: Run, line: dict[str, Any]) -> None:
    """Append a line to metrics.jsonl through the hook `metrics`, if the run has one."""
    for hook in run.hooks.by_label.values():
        if isinstance(hook, Metrics):
            hook.record(line)


def record_position(run: Run, phase: Phase, step: int) -> dict[str, Any]:
    """Return the entries of a line that say where in the plan it was written."""
    return {
        "updates": run.state.updates,
        "phase": phase.index,
        "split": phase.split,
        "epoch": phase.epoch,
        "step": step,
    }


@dataclass(frozen=True)
class _Reading:
    """Clock and counters at a moment, for rates.

    Attributes:
        at: seconds of the performance counter.
        samples: samples of the run up to then.
        data_seconds: seconds that this rank has waited for data.
    """

    at: float = 0.0
    samples: int = 0
    data_seconds: float = 0.0

    @classmethod
    def take(cls, run: Run) -> "_Reading":
        return cls(time.perf_counter(), run.state.samples, run.clock.seconds()["data"])


def _encode_number(value: float) -> float | str:
    """Return a number as JSON can hold it; non-finite ones as text."""
    if math.isfinite(value):
        return value
    # json.dumps would write NaN and Infinity, which most JSON parsers reject.
    return repr(value)


class LatestMetrics(Hook):
    """Keeps the latest value of every metric, by `split/name`, for the result."""

    main_only = False  # each rank returns the metrics in its result

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record the metrics of the phase."""
        self.metrics |= {f"{phase.split}/{name}": value for name, value in metrics.items()}
