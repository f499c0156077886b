"""The heartbeat of a supervised process: a file that says how far it has got."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heartbeat:
    """The position of a process in its run.

    Attributes:
        folder: the run folder; empty for a run that writes nothing.
        phase: index of the phase.
        step: steps of the phase that are complete.
        updates: updates of the run that are complete.
        activity: kind of the clock, see `phasetrain.runtime.clock.KINDS`.
        steps: steps and phases that the process has completed, of training and of tests.
    """

    folder: str
    phase: int
    step: int
    updates: int
    activity: str
    steps: int

    @property
    def place(self) -> tuple[int, int, str]:
        """Where in the plan the process is; equal if it gets there once more."""
        return self.phase, self.step, self.activity


def write_heartbeat(folder: str, heartbeat: Heartbeat) -> None:
    """Write the heartbeat of this process into the folder of its supervisor."""
    path = Path(folder, f"{os.getpid()}.json")
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    draft.replace(path)


def read_heartbeat(folder: str, pid: int) -> Heartbeat | None:
    """Return the last heartbeat of a process; None if it has not written any."""
    try:
        return Heartbeat(**json.loads(Path(folder, f"{pid}.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
