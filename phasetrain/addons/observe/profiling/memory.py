"""Records the memory of a run and the utilization of its GPU (hook `memory`)."""

import logging
import os
import pickle
import time
from collections.abc import Mapping

import torch

from phasetrain.addons.observe.profiling.device_usage import (
    NOT_LINUX,
    GpuReader,
    allocator_bytes,
    peak_resident_bytes,
)
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.error_policy import OnException
from phasetrain.hooks.metrics import record_line, record_position
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.child_processes import resident_bytes
from phasetrain.runtime.format import format_bytes
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

MEMORY_FILE = "memory.json"
"""File in the run folder with the peak values of each attempt."""

MAX_ALLOCATIONS = 100_000
"""Maximum number of allocations in a snapshot."""

COLUMNS = {
    "rss_bytes": "RSS",
    "peak_rss_bytes": "peak RSS",
    "workers_rss_bytes": "workers",
    "cuda_peak_allocated_bytes": "CUDA peak",
    "cuda_peak_reserved_bytes": "CUDA reserved",
    "gpu_percent": "GPU %",
    "gpu_celsius": "GPU C",
    "gpu_watts": "GPU W",
}
"""Columns of the table at the end."""


@HOOKS.register("memory")
class Memory(Hook):
    """Records the memory of rank 0, of its loader workers and of its device.

    Writes lines of kind `memory` to metrics.jsonl, with all values under `time`, and the peaks of
    each split and attempt to `memory.json`. Never waits for the device.

    Args:
        terminal: prints a table at the end with `RUN.verbosity=verbose`; passed by the program.
        every_updates: updates between two readings; the end of each phase is read as well.
        snapshot: let torch record CUDA allocations with their stacks, and write them to
            `memory-attempt1.pickle` at the end of the run or when the device is out of memory.
    """

    observe_only = True
    single = True
    policy: OnException = "ignore"

    def __init__(
        self, terminal: Terminal | None = None, every_updates: int = 100, *, snapshot: bool = False
    ) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.terminal = terminal
        self.every_updates = every_updates
        self.snapshot = snapshot
        self._folder: RunFolder | None = None
        self._device = torch.device("cpu")
        self._gpu = GpuReader(self._device)
        self._unavailable: dict[str, str] = {}
        self._peaks: dict[str, dict[str, float]] = {}
        self._updates = 0
        self._records_allocations = False

    def on_start(self, run: Run) -> None:
        """Find out which values can be read here, and log the others with the reason."""
        assert run.folder is not None, "the memory hook needs a run folder"
        self._folder = run.folder
        self._updates = run.state.updates
        self._device = run.task.parts.machine.device
        self._gpu = GpuReader(self._device)
        self._gpu.read()
        if peak_resident_bytes() is None:
            self._unavailable["rss"] = NOT_LINUX
        if self._gpu.unavailable:
            self._unavailable["gpu"] = self._gpu.unavailable
        if self.snapshot and self._device.type != "cuda":
            self._unavailable["snapshot"] = (
                f"torch records snapshots on CUDA only, not on {str(self._device)!r}"
            )
        elif self.snapshot:
            # Private, but documented by torch as the way to get snapshots.
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
            self._records_allocations = True
        for name, reason in self._unavailable.items():
            log.info("HOOKS.memory: %s is not recorded: %s", name, reason)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Reset the peaks of the device, so that they describe this phase."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record a line if it is due."""
        is_last = run.state.step == phase.steps  # `on_phase_end` records it
        if phase.is_train and not is_last and run.state.updates % self.every_updates == 0:
            self._record(run, phase, run.state.step)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record a line for the phase."""
        self._record(run, phase, phase.steps)

    def on_end(self, run: Run) -> None:
        """Write the snapshot, and print the table."""
        self._write_snapshot()
        if self.terminal is not None and self.terminal.verbosity == "verbose" and self._peaks:
            names = [name for name in COLUMNS if any(name in row for row in self._peaks.values())]
            rows = [
                (split, *(_format_value(name, row.get(name)) for name in names))
                for split, row in self._peaks.items()
            ]
            self.terminal.print_table(
                "peak memory", ("split", *(COLUMNS[name] for name in names)), rows
            )

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Write the snapshot if the device is out of memory."""
        if isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot()

    def close(self) -> None:
        """Add the peaks of this attempt to the file."""
        if self._records_allocations:
            # Recording costs memory and time, and the process may train again.
            torch.cuda.memory._record_memory_history(enabled=None)
        folder = self._folder
        # A lost folder belongs to another process, whose files must not be touched.
        if folder is None or folder.lost or not self._peaks:
            return
        before = folder.storage.read_json(folder.file(MEMORY_FILE))
        attempts = before.get("attempts") if isinstance(before, dict) else None
        if not isinstance(attempts, dict):
            attempts = {}
        attempts[str(folder.attempt)] = {
            "updates": self._updates,
            "left_out": self._unavailable,
            "splits": self._peaks,
        }
        content = {"attempts": attempts}
        try:
            folder.storage.replace_json(folder.file(MEMORY_FILE), content, durable=False)
        except OSError as error:
            log.warning(
                "HOOKS.memory: %s could not be written: %s", folder.file(MEMORY_FILE), error
            )

    def _record(self, run: Run, phase: Phase, step: int) -> None:
        workers = [pid for loader in run.task.parts.loaders.values() for pid in loader.worker_ids]
        values: dict[str, float] = {**allocator_bytes(self._device), **self._gpu.read()}
        if "rss" not in self._unavailable:
            own = resident_bytes([os.getpid()])
            values |= {
                "rss_bytes": own,
                # Linux rounds the two counters differently, so the peak can be the smaller one.
                "peak_rss_bytes": max(own, peak_resident_bytes() or 0),
                "workers": len(workers),
                "workers_rss_bytes": resident_bytes(workers),
            }
        peaks = self._peaks.setdefault(phase.split, {})
        peaks |= {name: max(value, peaks.get(name, value)) for name, value in values.items()}
        self._updates = run.state.updates
        position = record_position(run, phase, step)
        record_line(run, {"kind": "memory", **position, "time": {"at": time.time(), **values}})

    def _write_snapshot(self) -> None:
        folder = self._folder
        if not self._records_allocations or folder is None:
            return
        path = folder.file(f"memory-attempt{folder.attempt}.pickle")
        try:
            folder.storage.replace(path, pickle.dumps(torch.cuda.memory._snapshot()), durable=False)
        except OSError as error:
            log.warning("HOOKS.memory: the snapshot could not be written to %s: %s", path, error)


def _format_value(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.0f}"
