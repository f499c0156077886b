"""The base class of trackers: when a record is due, its content, and its names."""

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import Hook, Run
from phasetrain.runs.folder import RunFolder


@dataclass(frozen=True)
class Record:
    """The values that a tracker gets for a train step or a phase.

    Attributes:
        kind: `step`, `phase` or `media`.
        split: name of the split.
        phase, epoch, step, updates, samples: the position, counting complete steps.
        values: loss, learning rate and logged values of a step, or the metrics of a phase.
        at: seconds since 1970.
        speeds: values that differ between equal runs, such as `samples_per_second`.
        item: tag, kind and file of a `MediaRecord`; empty for other kinds.
    """

    kind: Literal["step", "phase", "media"]
    split: str
    phase: int
    epoch: int
    step: int
    updates: int
    samples: int
    values: Mapping[str, float]
    at: float
    speeds: Mapping[str, float] = field(default_factory=dict)
    item: Mapping[str, str] = field(default_factory=dict)

    def values_by_name(self) -> dict[str, float]:
        """Return the values by names such as `train/step_loss` and `test/accuracy`."""
        if self.kind == "phase":
            return {f"{self.split}/{name}": value for name, value in self.values.items()}
        # A phase has the mean of each logged number under the name without `step_`.
        values = {
            "optimizer/lr" if name == "lr" else f"{self.split}/step_{name}": value
            for name, value in self.values.items()
        }
        return values | {f"time/{name}": value for name, value in self.speeds.items()}


@dataclass(frozen=True)
class MediaRecord:
    """An item that was logged by `phasetrain.log_image` and the like.

    Attributes:
        tag: split and name, such as `test/samples`.
        kind: `image`, `text` or `audio`.
        phase, step, updates: the position.
        file: path in the run folder.
    """

    tag: str
    kind: Literal["image", "text", "audio"]
    phase: int
    step: int
    updates: int
    file: str


class Tracker(Hook):
    """Base class of hooks that write train steps and phases to a table or a service.

    There are two kinds. If the output can be truncated, a resume truncates it to the records that
    the checkpoint covers. If it cannot, records are sent when a committed checkpoint covers them
    (`phasetrain.addons.observe.trackers.spooled`). An error in a tracker does not stop the run.

    Args:
        every_updates: updates between two records of train steps; reading the loss waits for the
            device.
    """

    observe_only = True
    single = True
    reports_elsewhere = True
    policy = "ignore"

    def __init__(self, every_updates: int = 10) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.every_updates = every_updates
        self._since: tuple[float, int] = (0.0, 0)

    @abstractmethod
    def write(self, run: Run, record: Record) -> None:
        """Write a record; called on rank 0, between two steps."""

    def write_media(self, run: Run, record: MediaRecord, content: bytes) -> None:
        """Write an item that is a PNG, WAV or text file; called on rank 0. A tracker without an
        override leaves it out.

        Args:
            run: the run.
            record: the item.
            content: content of its file.
        """

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Start the clock of the phase."""
        self._since = time.perf_counter(), run.state.samples

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Write the step if it is due."""
        state = run.state
        if not phase.is_train or state.updates % self.every_updates or not run.world.is_main:
            return
        now = time.perf_counter()
        then, samples = self._since
        self._since = (now, state.samples)
        # float() waits for the device, so it comes after the check that a record is due.
        values = {"loss": float(out.loss), "lr": run.task.updater.lr}
        values |= {name: float(value) for name, value in out.logs.items()}
        speeds = {"samples_per_second": (state.samples - samples) / max(now - then, 1e-9)}
        self.write(run, _make_record("step", run, phase, state.step, values, speeds))

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write the metrics of the phase."""
        if run.world.is_main:
            self.write(run, _make_record("phase", run, phase, phase.steps, dict(metrics), {}))


def require_local_folder(folder: RunFolder, label: str) -> Path:
    """Return the path of a run folder on a local file system.

    Raises:
        ConfigError: the run folder is on an object store.
    """
    if not folder.storage.keeps_files:
        raise ConfigError(
            f"HOOKS.{label} needs a run folder on a local file system, and RUN.dir = "
            f"{folder.path!r} is on an object store; set HOOKS.{label}=null; metrics.jsonl has the "
            "same values",
            code="config.conflict",
        )
    return Path(folder.storage.local_path(folder.root))


def _make_record(
    kind: Literal["step", "phase"],
    run: Run,
    phase: Phase,
    step: int,
    values: Mapping[str, float],
    speeds: Mapping[str, float],
) -> Record:
    return Record(
        kind=kind,
        split=phase.split,
        phase=phase.index,
        epoch=phase.epoch,
        step=step,
        updates=run.state.updates,
        samples=run.state.samples,
        values=values,
        at=time.time(),
        speeds=speeds,
    )
