"""Parts that bring faults about within a run: a hook that sends signals, fills disks and the like,
and a data set.

What the data set does stands in the file `trouble` of the current folder, so that the config stays
what it is.
"""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from faulty import limit_files

from phasetrain.data import DATASETS
from phasetrain.data.datasets.digits import load_digits
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run


@HOOKS.register("fault_at")
class FaultAt(Hook):
    """Causes one fault, once, at a given moment of the run.

    Args:
        event: `made`, or the event of hooks that triggers it.
        updates: number of completed updates from which on the event triggers it.
        split: split of the phase; any if empty.
        do: `signal`, `fill` (the disk with the file `ballast` next to the run folder), `limit` (the
            size of files), `free` (undo both), or `kill_workers`.
        number: number of the signal.
        group: whether the signal goes to the whole process group.
        times: number of signals or kills.
        size: maximum size of a file, or size of the ballast, in bytes.
        seconds: sleep after a signal or a kill.
    """

    observe_only = True

    def __init__(
        self,
        event: str = "on_forward",
        updates: int = 0,
        split: str = "",
        do: str = "signal",
        number: int = signal.SIGTERM,
        group: bool = False,
        times: int = 1,
        size: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self.event, self.updates, self.split, self.do = event, updates, split, do
        self.number, self.group, self.times, self.size, self.seconds = (
            number,
            group,
            times,
            size,
            seconds,
        )
        self.done = False
        if event == "made":
            self._act(Path())

    def on_start(self, run: Run) -> None:
        self._at("on_start", run, None)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        self._at("on_phase_start", run, phase)

    def on_forward(self, run: Run, phase: Phase, out: Any) -> None:
        self._at("on_forward", run, phase)

    def on_step(self, run: Run, phase: Phase, out: Any) -> None:
        self._at("on_step", run, phase)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Any) -> None:
        self._at("on_phase_end", run, phase)

    def on_save(self, run: Run) -> None:
        self._at("on_save", run, None)

    def on_end(self, run: Run) -> None:
        self._at("on_end", run, None)

    def _at(self, event: str, run: Run, phase: Phase | None) -> None:
        fits = not self.split or (phase is not None and phase.split == self.split)
        if event != self.event or run.state.updates < self.updates or not fits or self.done:
            return
        self.done = True
        assert run.folder is not None
        self._act(Path(run.folder.path).parent / "ballast")

    def _act(self, ballast: Path) -> None:
        if self.do == "signal":
            for _ in range(self.times):
                (os.killpg if self.group else os.kill)(os.getpid(), self.number)
                time.sleep(
                    max(self.seconds, 0.15 if self.times > 1 else 0.0)
                )  # sooner it would be the same request
        elif self.do == "fill":
            fill(ballast, self.size)
        elif self.do == "limit":
            limit_files(self.size)
        elif self.do == "free":
            limit_files(-1)
            ballast.unlink(missing_ok=True)
        elif self.do == "kill_workers":
            for worker in multiprocessing.active_children():
                worker.kill()
            time.sleep(self.seconds)
        else:
            raise ValueError(f"do = {self.do!r}")


def fill(ballast: Path, left: int) -> None:
    """Fill the disk until about `left` bytes are free."""
    free = os.statvfs(ballast.parent).f_bavail * os.statvfs(ballast.parent).f_frsize
    with (
        suppress(OSError),
        ballast.open("wb", buffering=0) as file,
    ):  # a save under way may have taken the rest
        file.write(b"\0" * max(0, free - left))


def trouble() -> tuple[str, int]:
    """Return the planned fault and its sample or signal: `hang 200`, `kill 200` or `signal 15`."""
    try:
        what, at = Path("trouble").read_text().split()
    except FileNotFoundError:
        return "", -1
    return what, int(at)


class Troubled:
    """Digits; reading one of the samples may hang or kill the process."""

    def __init__(self, split: str) -> None:
        self.inner = load_digits(split=split)
        what, number = trouble()
        if what == "signal":
            os.kill(os.getpid(), number)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        what, at = trouble()
        if index == at and what == "hang":
            Path("met").touch()
            time.sleep(3600)
        if index == at and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner[index]

    def facts(self) -> Any:
        return self.inner.facts()

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


DATASETS.register("troubled")(Troubled)
