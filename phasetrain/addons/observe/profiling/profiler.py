"""Traces some updates with torch.profiler and lists the slowest operators (hook `profiler`)."""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import did_you_mean
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.error_policy import OnException
from phasetrain.runs.folder import SPARE_BYTES, RunFolder
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

ROOT = "profile"
"""Folder of the traces, in the run folder."""

STACK_DEPTH = 5
"""Stack frames that distinguish the rows of the table."""

SORT_COLUMNS = (
    *(f"{of}{device}_time_total" for of in ("self_", "") for device in ("cpu", "cuda")),
    *(f"{of}{device}_memory_usage" for of in ("self_", "") for device in ("cpu", "cuda")),
    *("cpu_time", "cuda_time", "count"),
)
"""Columns that the table can be sorted by, in torch's names."""

KINETO_SILENT = "6"
"""A log level of kineto above the level of its messages on the terminal."""

RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


@HOOKS.register("profiler")
class Profiler(Hook):
    """Runs `torch.profiler.profile` over some updates of an attempt.

    A cycle waits, warms up and records. Each cycle writes `profile/attempt1-u00000017.json.gz`,
    where 17 is the last update in it, and the slowest operators to a `.txt` file of the same name.
    The parts of an update are ranges in the trace named `phasetrain: forward` etc. Rank 0 is
    traced, without the workers of its loaders. An error in the profiler never ends a run.

    Args:
        terminal: prints the path of the traces, and with `RUN.verbosity=verbose` the table; passed
            by the program.
        wait: updates at the start of a cycle that are not traced.
        warmup: updates after them that are traced and discarded.
        active: updates after them that are recorded.
        repeat: number of cycles; 0 repeats until the end of the run.
        skip_first: updates of the attempt before the first cycle.
        shapes: record input shapes, and list an operator once per shape.
        stacks: record source lines, and list an operator once per stack.
        memory: record allocations.
        flops: estimate the FLOPs of matrix products and convolutions.
        rows: number of rows in the table.
        sort_by: column of the table, largest first; the default is the self time on the device.
    """

    observe_only = True
    single = True
    policy: OnException = "ignore"

    def __init__(
        self,
        terminal: Terminal | None = None,
        wait: int = 10,
        warmup: int = 2,
        active: int = 5,
        repeat: int = 1,
        skip_first: int = 0,
        *,
        shapes: bool = False,
        stacks: bool = False,
        memory: bool = False,
        flops: bool = False,
        rows: int = 20,
        sort_by: str | None = None,
    ) -> None:
        check_at_least(0, wait=wait, warmup=warmup, repeat=repeat, skip_first=skip_first)
        check_at_least(1, active=active, rows=rows)
        if sort_by is not None and sort_by not in SORT_COLUMNS:
            raise ValueError(
                f"sort_by = {sort_by!r}: the table has no such column"
                f"{did_you_mean(sort_by, SORT_COLUMNS) or '.'} Known: {', '.join(SORT_COLUMNS)}"
            )
        self.terminal = terminal
        self.active = active
        self.rows = rows
        self.sort_by = sort_by
        self.shapes = shapes
        self.stacks = stacks
        self.memory = memory
        self.flops = flops
        with _hide_advice():
            self._schedule = schedule(
                wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first
            )
        self._first = skip_first + wait + warmup
        self._last = skip_first + repeat * (wait + warmup + active) if repeat else None
        self._profile: profile | None = None
        self._folder: RunFolder | None = None
        self._ranges = _TraceRanges()
        self._steps = 0  # of the schedule
        self._updates = 0
        self._recorded = 0  # updates in the current cycle
        self._written: list[str] = []
        self._partial = ""

    def on_start(self, run: Run) -> None:
        """Start the profiler."""
        assert run.folder is not None, "the profiler hook needs a run folder"
        self._folder = run.folder
        self._updates = run.state.updates
        device = run.task.parts.machine.device.type
        if self.sort_by is None:
            self.sort_by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
        if device == "cpu":  # kineto would only print when it starts and stops
            os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_SILENT)
        _check_no_other_profiler()
        profiler = profile(
            activities=[
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if device == "cuda" else []),
            ],
            schedule=self._schedule,
            on_trace_ready=self._finish_cycle,
            record_shapes=self.shapes,
            profile_memory=self.memory,
            with_stack=self.stacks,
            with_flops=self.flops,
        )
        with _hide_advice():
            profiler.start()
        self._profile = profiler
        self._ranges.recording = profiler.current_action in RECORDING
        self._ranges.begin("data")

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Begin the range of a phase."""
        self._ranges.begin("data" if phase.is_train else phase.split)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Begin the range between two phases."""
        self._ranges.begin("between phases")

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Begin the range of the forward pass."""
        if phase.is_train:
            self._ranges.begin("forward")

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Begin the range of the backward pass."""
        if phase.is_train:
            self._ranges.begin("backward")

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Begin the range of meters and update."""
        self._ranges.begin("update")

    def on_update(self, run: Run, phase: Phase) -> None:
        """Begin the range of other hooks."""
        self._ranges.begin("hooks")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Advance the schedule, and stop the profiler after its last step."""
        profiler = self._profile
        if profiler is None or not phase.is_train:
            return
        self._ranges.end()
        self._steps += 1
        self._updates = run.state.updates
        self._recorded += profiler.current_action in RECORDING
        # If `step` raises, the profiler must not be stepped again: set it back only on success.
        self._profile = None
        if profiler.current_action is ProfilerAction.NONE:
            _check_no_other_profiler()
        with _hide_advice():
            profiler.step()
        if self._steps == self._last:
            profiler.stop()
            return
        self._profile = profiler
        self._ranges.recording = profiler.current_action in RECORDING
        self._ranges.begin("data")

    def close(self) -> None:
        """Write the trace of an unfinished cycle, and print where the traces are."""
        profiler = self._profile
        self._profile = None
        self._ranges.end()
        if profiler is not None:
            profiler.stop()
        if self.terminal is not None and self._folder is not None:
            self.terminal.print_pairs([(ROOT, self._summarize())])

    def _finish_cycle(self, done: profile) -> None:
        """Write the trace of a cycle, or log a warning if that fails."""
        count = self._recorded
        self._recorded = 0
        if count and self._folder is not None and not self._folder.lost:
            self._write_cycle(done, count)
        done.profiler = None  # frees the events, which torch keeps until the next cycle

    def _write_cycle(self, done: profile, count: int) -> None:
        assert self._folder is not None
        first = self._updates - count + 1
        span = f"updates {first} to {self._updates} of attempt {self._folder.attempt}"
        path = f"{ROOT}/attempt{self._folder.attempt}-u{self._updates:08d}"
        rows = done.key_averages(
            group_by_input_shape=self.shapes, group_by_stack_n=STACK_DEPTH if self.stacks else 0
        )
        text = rows.table(sort_by=self.sort_by, row_limit=self.rows).rstrip()
        table = f"{span}, rank 0\n{text}\n"
        try:
            _write_trace(self._folder, path, done, table)
        except OSError as error:
            log.warning(
                "HOOKS.profiler: %s could not be written to %s: %s",
                span,
                self._folder.file(path),
                error,
            )
            return
        self._written.append(path)
        if count < self.active:
            self._partial = f", the last one with {count} of {self.active} updates"
        else:
            self._partial = ""
        if self.terminal is not None and self.terminal.verbosity == "verbose":
            self.terminal.say(table)

    def _summarize(self) -> str:
        assert self._folder is not None
        if self._written:
            count = len(self._written)
            traces = "1 trace" if count == 1 else f"{count} traces"
            folder = f"{self._folder.file(ROOT)}/{self._partial}"
            return f"{traces} in {folder}; open them on ui.perfetto.dev or in chrome://tracing"
        if self._steps <= self._first:
            return (
                f"nothing was recorded: this attempt made {self._steps} updates, and recording "
                f"starts after {self._first}"
            )
        return "nothing was written; log.txt has the reason"


class _TraceRanges:
    """Opens and closes the ranges in a trace that name the parts of an update.

    Attributes:
        recording: whether the profiler records; otherwise nothing is opened.
    """

    def __init__(self) -> None:
        self.recording = False
        self._open: Any = None

    def begin(self, name: str) -> None:
        """End the current range and begin another one."""
        if self.recording:
            self.end()
            self._open = record_function(f"phasetrain: {name}")
            self._open.__enter__()

    def end(self) -> None:
        """End the current range."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


@contextmanager
def _hide_advice() -> Iterator[None]:
    """Hide warnings of torch about `warmup: 0`, a setting of the hook, and (torch 2.11) about
    events of former cycles, which the hook has already written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        yield


def _check_no_other_profiler() -> None:
    # torch has no public function for this; starting a second profiler can crash the process.
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "another torch.profiler is active in this process, and its trace would be lost; stop "
            "it before the run, or set HOOKS.profiler=null"
        )


def _write_trace(folder: RunFolder, path: str, done: profile, table: str) -> None:
    """Write a trace and its table to the run folder.

    Raises:
        OSError: the disk is full, or would leave too little room for checkpoints.
    """
    # kineto writes local files only, and the run folder may be an object store.
    with tempfile.TemporaryDirectory() as scratch:
        name = str(Path(scratch) / "trace.json.gz")
        done.export_chrome_trace(name)
        trace = Path(name).read_bytes()
    free = folder.space.free_bytes()
    if free is not None and free < len(trace) + len(table) + SPARE_BYTES:
        raise OSError(f"it needs {len(trace):,} bytes, and {free:,} are free")
    folder.storage.make_folder(folder.file(ROOT))
    folder.storage.replace(folder.file(f"{path}.json.gz"), trace, durable=False)
    folder.storage.replace(folder.file(f"{path}.txt"), table.encode(), durable=False)
