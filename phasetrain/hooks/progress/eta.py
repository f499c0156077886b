"""Times the steps of a run and estimates the remaining time."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from phasetrain.engine.plan import TRAIN, Phase, Plan

PIECES = 5
"""Number of pieces of the timed steps whose speeds are compared."""

SPREAD = 0.1
"""Smallest spread of an estimate: no run is as even as a few seconds of it."""


@dataclass
class TimedSteps:
    """Number and seconds of the timed steps of a split in this attempt."""

    steps: int = 0
    seconds: float = 0.0


class EtaEstimator:
    """Times the steps of each split and estimates the remaining time.

    The first step of a split in an attempt is not timed: it starts workers and fills caches.
    """

    def __init__(self) -> None:
        self._speeds: dict[str, TimedSteps] = {}
        self._later: Counter[str] = Counter()
        self._counted: tuple[Plan, int] | None = None  # plan, and index of the first later phase
        self._phase: Phase | None = None
        self._mark = 0
        self._since = 0.0
        self._warm = True

    def enter(self, phase: Phase, step: int, plan: Plan) -> bool:
        """Begin a phase at `step`; return whether `begin` has to be called after its first step."""
        self._phase = phase
        self._count_later_steps(phase, plan)
        self._mark = step
        self._since = time.perf_counter()
        self._warm = phase.split in self._speeds
        return not self._warm

    def _count_later_steps(self, phase: Phase, plan: Plan) -> None:
        # From the phase before: counting all later phases in each one would take minutes in a plan
        # with a million phases.
        if self._counted is None or self._counted[0] is not plan:
            self._later = Counter()
            for later, count in plan.phases[phase.index :].kinds:
                self._later[later.split] += count * later.steps
            self._counted = (plan, phase.index)
        _, first = self._counted
        for entered in plan.phases[first : phase.index + 1]:
            self._later[entered.split] -= entered.steps
        self._counted = (plan, phase.index + 1)

    def begin(self, step: int) -> None:
        """Start timing after the first step of a split."""
        if not self._warm:
            self._mark = step
            self._since = time.perf_counter()
            self._warm = True

    def leave(self, phase: Phase) -> None:
        """Add the timed steps of a complete phase to its split; a stop may have shortened it."""
        if self._phase is None:
            return
        now = self._time_current(phase.steps)
        speed = self._speeds.setdefault(phase.split, TimedSteps())
        speed.steps += now.steps
        speed.seconds += now.seconds
        self._phase = None

    def measure_rate(self, step: int) -> tuple[float, float]:
        """Return the timed steps of this phase per second, and the seconds they took."""
        now = self._time_current(step)
        if now.steps and now.seconds:
            return now.steps / now.seconds, now.seconds
        return 0.0, now.seconds

    def estimate_remaining(self, step: int) -> tuple[float, float] | None:
        """Return the remaining seconds of the phase and of the run; None before any timed step."""
        phase = self._phase
        if phase is None:
            return None
        here = self._seconds_per_step(phase.split, step)
        if here is None:
            return None
        seconds = (phase.steps - step) * here
        later = 0.0
        for split, steps in self._later.items():
            # A split without timed steps is assumed to be as fast as the current one.
            each = self._seconds_per_step(split, step)
            later += steps * (here if each is None else each)
        return seconds, seconds + later

    def train_steps(self, step: int) -> TimedSteps:
        """Return the timed train steps of this attempt."""
        return self._time_split(TRAIN, step)

    def _time_split(self, split: str, step: int) -> TimedSteps:
        complete = self._speeds.get(split, TimedSteps())
        if self._phase is None or self._phase.split != split:
            return complete
        now = self._time_current(step)
        return TimedSteps(complete.steps + now.steps, complete.seconds + now.seconds)

    def _time_current(self, step: int) -> TimedSteps:
        if not self._warm:
            return TimedSteps()
        return TimedSteps(step - self._mark, time.perf_counter() - self._since)

    def _seconds_per_step(self, split: str, step: int) -> float | None:
        timed = self._time_split(split, step)
        if timed.steps:
            return timed.seconds / timed.steps
        return None


def measure_spread(marks: Sequence[TimedSteps]) -> tuple[float, float]:
    """Return how much slower and faster than on average some of the steps were, as factors of the
    time.

    Args:
        marks: timed steps so far, one after the other.
    """
    last = marks[-1]
    average = last.seconds / last.steps
    edges = [marks[piece * (len(marks) - 1) // PIECES] for piece in range(PIECES + 1)]
    paces = [
        (after.seconds - before.seconds) / (after.steps - before.steps) / average
        for before, after in pairwise(edges)
        if after.steps > before.steps
    ]
    slowest = max(paces, default=0.0)
    fastest = min(paces, default=1.0)
    return max(slowest, 1 + SPREAD), min(fastest, 1 - SPREAD)
