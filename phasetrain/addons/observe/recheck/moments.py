"""Chooses the moments of rechecks."""

import math
import random
import time
from typing import Literal

SHARE = 0.01
"""Share of the time that rechecks take with every_minutes = auto."""

FIRST_SECONDS = 10.0
"""Interval before the cost of a recheck is known."""


class Moments:
    """One random moment in each interval of the wall time.

    Args:
        every_minutes: length of an interval; `auto` chooses it by the cost of the last recheck.
    """

    def __init__(self, every_minutes: float | Literal["auto"]) -> None:
        self.every_minutes = every_minutes
        # Another generator than the run's, seeded by the system: rechecks must not change the
        # random numbers of the run, and each run on a faulty machine should check other updates.
        self._random = random.Random()
        self._moment = math.inf
        self._interval_end = 0.0

    def start(self) -> None:
        """Begin the first interval."""
        self._interval_end = time.monotonic()
        self.choose_next()

    def choose_next(self, seconds: float = 0.0) -> None:
        """Choose a moment in the next interval.

        Args:
            seconds: time that the last recheck has taken; 0 before the first one.
        """
        if self.every_minutes != "auto":
            interval = 60 * float(self.every_minutes)
        elif seconds:
            interval = seconds / SHARE
        else:
            interval = FIRST_SECONDS
        # One moment per interval, and not one interval after the last moment: each update has the
        # same probability, however regularly a run alternates between training and tests.
        begin = max(self._interval_end, time.monotonic())
        self._moment = begin + self._random.uniform(0, interval)
        self._interval_end = begin + interval

    def take(self) -> bool:
        """Return once whether the moment has come."""
        if time.monotonic() < self._moment:
            return False
        self._moment = math.inf
        return True
