"""What all trackers share: when a record is due, what it holds, and how it is named."""

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import Hook, Run


@dataclass(frozen=True)
class Record:
    """What a tracker is told of a train step or of a phase.

    Attributes:
        kind: of a step, or of a phase.
        split: name of the split.
        phase, epoch, step, updates, samples: the position, complete steps counted.
        values: of a step its loss, the learning rate and what parts have logged; of a phase its
            metrics.
        at: seconds since 1970.
        speeds: what differs between equal runs, such as `samples_per_second`.
    """

    kind: Literal["step", "phase"]
    split: str
    phase: int
    epoch: int
    step: int
    updates: int
    samples: int
    values: Mapping[str, float]
    at: float
    speeds: Mapping[str, float] = field(default_factory=dict)

    def named(self) -> dict[str, float]:
        """Return the values under the names that a tracker of many runs shows: `train/step_loss`,
        `test/accuracy`."""
        if self.kind == "phase":
            return {f"{self.split}/{name}": value for name, value in self.values.items()}
        own = {"loss": f"{self.split}/step_loss", "lr": "optimizer/lr"}
        found = {
            own.get(name, f"{self.split}/{name}"): value for name, value in self.values.items()
        }
        return found | {f"time/{name}": value for name, value in self.speeds.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON data."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """Return the record that `to_json` wrote."""
        return cls(**data)


class Tracker(Hook):
    """Hears of train steps and phases, and writes them somewhere; it must not stop a run when it
    fails.

    A tracker is one of two kinds. What it writes may be cut back: then a resume cuts it to what the
    checkpoint covers. Or it cannot be unwritten: then it hands on only what a committed checkpoint
    covers (`phasetrain.hooks.trackers.spooled`).

    Args:
        every_updates: hear of a train step after each so many updates; reading the loss waits for
            the device.
    """

    observe_only = True
    single = True
    policy = "ignore"

    def __init__(self, every_updates: int = 10) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.every_updates = every_updates
        self._since: tuple[float, int] = (0.0, 0)

    @abstractmethod
    def write(self, run: Run, record: Record) -> None:
        """Take a record; called on the main process, between two steps."""

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Start the clock of the phase."""
        self._since = time.perf_counter(), run.state.samples

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Write the step if it is due."""
        state = run.state
        if not phase.is_train or state.updates % self.every_updates or not run.world.is_main:
            return
        now, (then, samples) = time.perf_counter(), self._since
        self._since = now, state.samples
        values = {"loss": float(out.loss), "lr": run.task.updater.lr}
        values |= {name: float(value) for name, value in out.logs.items()}
        speeds = {"samples_per_second": (state.samples - samples) / max(now - then, 1e-9)}
        self.write(run, _record("step", run, phase, state.step, values, speeds))

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write the metrics of the phase."""
        if run.world.is_main:
            self.write(run, _record("phase", run, phase, phase.steps, dict(metrics), {}))


def _record(
    kind: Literal["step", "phase"],
    run: Run,
    phase: Phase,
    step: int,
    values: Mapping[str, float],
    speeds: Mapping[str, float],
) -> Record:
    state = run.state
    where = (phase.split, phase.index, phase.epoch, step, state.updates, state.samples)
    return Record(kind, *where, values, time.time(), speeds)
