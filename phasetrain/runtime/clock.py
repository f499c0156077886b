"""Splits the wall time of a run by activity."""

import time
from collections.abc import Mapping
from math import sqrt

KINDS = ("start", "train", "test", "data", "save", "redone", "end")
"""Activities: set-up and restore, steps of train and test phases with their hooks, waiting for
batches, waiting for checkpoints, train steps repeated because an earlier attempt lost them, and
the time after the last step."""


class Clock:
    """Sums up seconds by kind; exactly one kind runs at any moment.

    Args:
        began: `time.perf_counter()` at the start of the process or attempt, from which the kind
            `start` runs.

    Attributes:
        kind: the kind that runs now.
        redo_until: number of updates an earlier attempt had completed; train steps before it count
            as `redone`.
        start_parts: parts of the start and their seconds, in the order of `end_part`.
    """

    def __init__(self, began: float | None = None) -> None:
        self.kind = "start"
        self.redo_until = 0
        self.start_parts: dict[str, float] = {}
        if began is None:
            began = time.perf_counter()
        self._since = began
        self._seconds = dict.fromkeys(KINDS, 0.0)

    def switch_to(self, kind: str) -> str:
        """Switch to `kind` and return the kind that ran before."""
        now = time.perf_counter()
        before = self.kind
        self._seconds[before] += now - self._since
        self._since = now
        self.kind = kind
        return before

    def end_part(self, name: str) -> None:
        """End a part of the start, before the first call of `switch_to`."""
        spent = time.perf_counter() - self._since
        self.start_parts[name] = spent - sum(self.start_parts.values())

    def step(self, updates: int, *, is_train: bool) -> None:
        """Switch to the kind of a step that starts after `updates` updates."""
        if not is_train:
            self.switch_to("test")
        elif updates < self.redo_until:
            self.switch_to("redone")
        else:
            self.switch_to("train")

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every kind up to now."""
        # Without switch_to(): a reader in another thread must not move the clock.
        return self._seconds | {
            self.kind: self._seconds[self.kind] + time.perf_counter() - self._since
        }


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the fraction of the time spent in steps of the plan, in [0, 1]."""
    total = sum(seconds.values())
    if total:
        return (seconds.get("train", 0.0) + seconds.get("test", 0.0)) / total
    return 0.0


DAY = 24 * 60 * 60.0
"""Seconds between interruptions of a run that has not been interrupted yet."""


def young_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """Return the seconds between checkpoints that minimize the lost time (Young 1974,
    doi:10.1145/361147.361115).

    Args:
        stall_seconds: cost of one checkpoint.
        seconds_between_failures: mean time between interruptions.
    """
    return sqrt(2.0 * stall_seconds * seconds_between_failures)
