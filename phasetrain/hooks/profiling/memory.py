"""Tells how much memory a run takes, and how busy its GPU is (hook `memory`)."""

import logging
import os
import pickle
import time
from collections.abc import Mapping

import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.error_policy import OnException
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.profiling.resource_usage import (
    NOT_LINUX,
    Gpu,
    allocator_bytes,
    peak_resident_bytes,
    resident_bytes,
)
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.format import format_bytes
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

FILE = "memory.json"
"""Name of the file in the run folder with the largest figures of each attempt."""

HISTORY = 100_000
"""Allocations that a snapshot remembers."""

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
    """Reads the memory of process 0, of its loaders' workers and of its device, now and then and
    after each phase.

    Lines of the kind `memory` in metrics.jsonl, with all figures under `time`; the largest of each
    split and attempt in `memory.json`. The device is never waited for.

    Args:
        terminal: fact; gets a table at the end on `RUN.verbosity=verbose`.
        every_updates: read after each so many updates, and at the end of each phase.
        snapshot: let torch remember CUDA allocations with their stacks, and write them to
            `memory-attempt1.pickle` at the end, or when memory has run out.
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
        self._gpu = Gpu(self._device)
        self._left_out: dict[str, str] = {}
        self._largest: dict[str, dict[str, float]] = {}
        self._reached = 0
        self._remembers = False

    def on_start(self, run: Run) -> None:
        """See what can be read here, and say what cannot."""
        assert run.folder is not None, "the memory hook needs a run folder"
        self._folder = run.folder
        self._reached = run.state.updates
        self._device = run.task.parts.machine.device
        self._gpu = Gpu(self._device)
        self._gpu.read()
        if peak_resident_bytes() is None:
            self._left_out["rss"] = NOT_LINUX
        if self._gpu.silent:
            self._left_out["gpu"] = self._gpu.silent
        if self.snapshot and self._device.type != "cuda":
            self._left_out["snapshot"] = (
                f"torch keeps none for MACHINE.device = {str(self._device)!r}"
            )
        elif self.snapshot:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)
            self._remembers = True
        for what, why in self._left_out.items():
            log.info("HOOKS.memory: %s is left out: %s", what, why)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Let the peaks of the device be those of the phase."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Read if it is due."""
        is_last = run.state.step == phase.steps  # then the end of the phase reads
        if phase.is_train and not is_last and run.state.updates % self.every_updates == 0:
            self._read(run, phase, run.state.step)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Read what the phase has taken."""
        self._read(run, phase, phase.steps)

    def on_end(self, run: Run) -> None:
        """Write the snapshot, and show the table."""
        self._write_snapshot()
        if self.terminal is not None and self.terminal.verbosity == "verbose" and self._largest:
            names = [
                name for name in COLUMNS if any(name in found for found in self._largest.values())
            ]
            rows = [
                (split, *(_shown(name, found.get(name)) for name in names))
                for split, found in self._largest.items()
            ]
            self.terminal.table(
                "memory, largest", ("split", *(COLUMNS[name] for name in names)), rows
            )

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Write the snapshot if memory has run out."""
        if isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot()

    def close(self) -> None:
        """Write the figures of this attempt beside those of the attempts before it."""
        if self._remembers:
            torch.cuda.memory._record_memory_history(enabled=None)
        folder = self._folder
        if folder is None or folder.lost or not self._largest:
            return
        before = folder.storage.read_json(folder.file(FILE))
        attempts = before.get("attempts") if isinstance(before, dict) else None
        found = {"updates": self._reached, "left_out": self._left_out, "splits": self._largest}
        content = {
            "attempts": {
                **(attempts if isinstance(attempts, dict) else {}),
                str(folder.attempt): found,
            }
        }
        try:
            folder.storage.replace_json(folder.file(FILE), content, durable=False)
        except OSError as error:
            log.warning("HOOKS.memory: %s could not be written: %s", folder.file(FILE), error)

    def _read(self, run: Run, phase: Phase, step: int) -> None:
        workers = [pid for loader in run.task.parts.loaders.values() for pid in loader.worker_ids]
        found: dict[str, float] = {**allocator_bytes(self._device), **self._gpu.read()}
        if "rss" not in self._left_out:
            own = resident_bytes([os.getpid()])
            found |= {
                "rss_bytes": own,
                "peak_rss_bytes": max(own, peak_resident_bytes() or 0),
            }  # Linux rounds each
            found |= {"workers": len(workers), "workers_rss_bytes": resident_bytes(workers)}
        largest = self._largest.setdefault(phase.split, {})
        largest |= {name: max(value, largest.get(name, value)) for name, value in found.items()}
        self._reached = run.state.updates
        line = {
            "kind": "memory",
            "updates": run.state.updates,
            "phase": phase.index,
            "split": phase.split,
            "epoch": phase.epoch,
            "step": step,
            "time": {"at": time.time(), **found},
        }
        for hook in run.hooks.by_label.values():
            if isinstance(hook, Metrics):
                hook.record(line)

    def _write_snapshot(self) -> None:
        folder = self._folder
        if not self._remembers or folder is None:
            return
        path = folder.file(f"memory-attempt{folder.attempt}.pickle")
        try:
            folder.storage.replace(path, pickle.dumps(torch.cuda.memory._snapshot()), durable=False)
        except OSError as error:
            log.warning("HOOKS.memory: the snapshot could not be written to %s: %s", path, error)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.0f}"
