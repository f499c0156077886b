"""Traces some updates with torch.profiler: what ran when, and the slowest operators as a table
(hook `profiler`)."""

import logging
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import did_you_mean
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.error_policy import OnException
from phasetrain.runs.folder import SPARE_BYTES, RunFolder
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

ROOT = "profile"
"""Folder in the run folder."""

STACK = 5
"""Calls of a stack that rows of the table are told apart by."""

SORTS = (
    *(f"{of}{device}_time_total" for of in ("self_", "") for device in ("cpu", "cuda")),
    *(f"{of}{device}_memory_usage" for of in ("self_", "") for device in ("cpu", "cuda")),
    *("cpu_time", "cuda_time", "count"),
)
"""What the table can be sorted by, as torch names it."""

SILENT = "6"
"""A level of kineto's log above that of everything that it writes to the terminal."""

RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


@HOOKS.register("profiler")
class Profiler(Hook):
    """Runs `torch.profiler.profile` over some updates of an attempt; a step of its schedule is an
    update.

    A cycle waits, warms up and records; each leaves `profile/attempt1-u00000017.json.gz`, where 17
    is the last update in it, and the slowest operators in a `.txt` beside it. The parts of an
    update stand in the trace as ranges named `phasetrain: forward` and so on. Process 0 is traced,
    the workers of loaders are not. No failure of it ends a run.

    Args:
        terminal: fact; where the place of the traces is told, and on `RUN.verbosity=verbose` the
            table.
        wait: updates of a cycle that pass by first.
        warmup: updates after them in which the tracer runs and nothing is kept.
        active: updates after them that are recorded.
        repeat: cycles; 0 for as long as the run goes on.
        skip_first: updates of the attempt before the first cycle.
        shapes: keep the shapes of inputs, and tell operators apart by them.
        stacks: keep lines of source code, and tell operators apart by them.
        memory: keep what operators allocate and free.
        flops: estimate the work of matrix products and convolutions.
        rows: of the table.
        sort_by: column of the table, largest first; by default the time of an operator itself on
            the device.
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
        for key, value, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 0),
            ("skip_first", skip_first, 0),
            ("rows", rows, 1),
        ):
            if value < least:
                raise ValueError(f"{key} = {value}: expected at least {least}")
        if sort_by is not None and sort_by not in SORTS:
            raise ValueError(
                f"sort_by = {sort_by!r}: the table has no such column{did_you_mean(sort_by, SORTS) or '.'} Known: "
                f"{', '.join(SORTS)}"
            )
        self.terminal = terminal
        self.active = active
        self.rows = rows
        self.sort_by = sort_by
        self.shapes = shapes
        self.stacks = stacks
        self.memory = memory
        self.flops = flops
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")
            self._schedule = schedule(
                wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first
            )
        self._first = skip_first + wait + warmup
        self._ends = skip_first + repeat * (wait + warmup + active) if repeat else None
        self._profile: profile | None = None
        self._folder: RunFolder | None = None
        self._parts = _Parts()
        self._steps = self._updates = self._recorded = 0
        self._written: list[str] = []
        self._partial = ""

    def on_start(self, run: Run) -> None:
        """Begin with the schedule."""
        assert run.folder is not None, "the profiler hook needs a run folder"
        self._folder = run.folder
        self._updates = run.state.updates
        device = run.task.parts.machine.device.type
        if self.sort_by is None:
            self.sort_by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
        if device == "cpu":  # there kineto has nothing to say but when it begins and ends
            os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        _require_no_other()
        prepared = profile(
            activities=[
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if device == "cuda" else []),
            ],
            schedule=self._schedule,
            on_trace_ready=self._ready,
            record_shapes=self.shapes,
            profile_memory=self.memory,
            with_stack=self.stacks,
            with_flops=self.flops,
        )
        prepared.start()
        self._profile = prepared
        self._parts.records = prepared.current_action in RECORDS
        self._parts.turn("data")

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Mark what comes as of training or of a test."""
        self._parts.turn("data" if phase.is_train else phase.split)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Mark what comes between two phases."""
        self._parts.turn("between phases")

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Mark the forward pass."""
        if phase.is_train:
            self._parts.turn("forward")

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Mark the backward pass."""
        if phase.is_train:
            self._parts.turn("backward")

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Mark meters and update."""
        self._parts.turn("update")

    def on_update(self, run: Run, phase: Phase) -> None:
        """Mark what other hooks do."""
        self._parts.turn("hooks")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Take a step of the schedule, and end with its last one."""
        running = self._profile
        if running is None or not phase.is_train:
            return
        self._parts.end()
        self._steps += 1
        self._updates = run.state.updates
        self._recorded += running.current_action in RECORDS
        self._profile = None  # unless this goes well
        if running.current_action is ProfilerAction.NONE:
            _require_no_other()
        running.step()
        if self._steps == self._ends:
            running.stop()
            return
        self._profile = running
        self._parts.records = running.current_action in RECORDS
        self._parts.turn("data")

    def close(self) -> None:
        """End a cycle that is under way with what it has, and tell where the traces are."""
        running, self._profile = self._profile, None
        self._parts.end()
        if running is not None:
            running.stop()
        if self.terminal is not None and self._folder is not None:
            self.terminal.pairs([(ROOT, self._told())])

    def _ready(self, done: profile) -> None:
        """Write what a cycle has recorded, and let go of it; an error of the file system is warned
        of."""
        count, self._recorded = self._recorded, 0
        if count and self._folder is not None and not self._folder.lost:
            self._write(done, count)
        done.profiler = None

    def _write(self, done: profile, count: int) -> None:
        assert self._folder is not None
        span = f"updates {self._updates - count + 1} to {self._updates} of attempt {self._folder.attempt}"
        path = f"{ROOT}/attempt{self._folder.attempt}-u{self._updates:08d}"
        rows = done.key_averages(
            group_by_input_shape=self.shapes, group_by_stack_n=STACK if self.stacks else 0
        )
        table = (
            f"{span}, process 0\n{rows.table(sort_by=self.sort_by, row_limit=self.rows).rstrip()}\n"
        )
        try:
            _write(self._folder, path, done, table)
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
            self._partial = f", the last of which has {count} of {self.active} updates"
        else:
            self._partial = ""
        if self.terminal is not None and self.terminal.verbosity == "verbose":
            self.terminal.say(table)

    def _told(self) -> str:
        assert self._folder is not None
        if self._written:
            count = len(self._written)
            traces = f"{count} trace{'s' if count > 1 else ''} in {self._folder.file(ROOT)}/{self._partial}"
            return f"{traces}; open them on ui.perfetto.dev or in chrome://tracing"
        if self._steps <= self._first:
            made = (
                f"this attempt made {self._steps} updates, and recording begins after {self._first}"
            )
            return f"nothing was recorded: {made}"
        return "nothing was written; log.txt has the reason"


class _Parts:
    """Marks in a trace which part of an update runs; nothing while nothing is recorded.

    Attributes:
        records: whether something is.
    """

    def __init__(self) -> None:
        self.records = False
        self._open: Any = None

    def turn(self, name: str) -> None:
        """End the part that runs and begin another one."""
        if self.records:
            self.end()
            self._open = record_function(f"phasetrain: {name}")
            self._open.__enter__()

    def end(self) -> None:
        """End the part that runs."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _require_no_other() -> None:
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "another profiler of torch records in this process, and its trace would be lost; end it before the run, or "
            "set HOOKS.profiler=null"
        )


def _write(folder: RunFolder, path: str, done: profile, table: str) -> None:
    """Write a trace and its table; kineto writes files of this machine only, so it goes by way of
    one.

    Raises:
        OSError: there is no room, or less than checkpoints may need.
    """
    with tempfile.TemporaryDirectory() as place:
        name = str(Path(place) / "trace.json.gz")
        done.export_chrome_trace(name)
        trace = Path(name).read_bytes()
    free = folder.free()
    if free is not None and free < len(trace) + len(table) + SPARE_BYTES:
        raise OSError(f"it needs {len(trace):,} bytes, and {free:,} are free")
    folder.storage.make_folder(folder.file(ROOT))
    folder.storage.replace(folder.file(f"{path}.json.gz"), trace, durable=False)
    folder.storage.replace(folder.file(f"{path}.txt"), table.encode(), durable=False)
