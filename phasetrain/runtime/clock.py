"""Where the wall time of a run goes."""

import time
from collections.abc import Mapping
from math import sqrt

KINDS = ("start", "train", "test", "data", "save", "redone", "end")
"""What time is spent on: getting ready and restoring, steps of train and test phases with their
hooks, waiting for batches, waiting for checkpoints, train steps that an earlier attempt had done
and lost, and what comes after the last step."""


class Clock:
    """Adds up seconds by kind; at every moment exactly one kind runs.

    Args:
        began: `time.perf_counter()` at the start of the process or of the attempt; the kind `start`
            runs from there.

    Attributes:
        kind: the kind that runs.
        redo_until: updates that an earlier attempt had reached; train steps up to there are
            `redone`.
    """

    def __init__(self, began: float | None = None) -> None:
        self.kind = "start"
        self.redo_until = 0
        self._since = time.perf_counter() if began is None else began
        self._seconds = dict.fromkeys(KINDS, 0.0)

    def turn(self, kind: str) -> str:
        """Let `kind` run from now on and return the one that ran."""
        now = time.perf_counter()
        before = self.kind
        self._seconds[before] += now - self._since
        self._since = now
        self.kind = kind
        return before

    def step(self, updates: int, *, is_train: bool) -> None:
        """Let the kind of a step run that begins after so many updates."""
        self.turn(("redone" if updates < self.redo_until else "train") if is_train else "test")

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every kind up to now."""
        return self._seconds | {
            self.kind: self._seconds[self.kind] + time.perf_counter() - self._since
        }


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the share of the time that went into steps of the plan, in [0, 1]."""
    total = sum(seconds.values())
    if total:
        return (seconds.get("train", 0.0) + seconds.get("test", 0.0)) / total
    return 0.0


def young_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """Return the seconds between checkpoints that lose the least time (Young 1974,
    doi:10.1145/361147.361115).

    Args:
        stall_seconds: what one checkpoint costs.
        seconds_between_failures: mean time between interruptions.
    """
    return sqrt(2.0 * stall_seconds * seconds_between_failures)
