"""How fast a run goes, and the time that is left of a phase and of all of them."""

import time
from collections import Counter
from dataclasses import dataclass

from phasetrain.engine.plan import TRAIN, Phase, Plan


@dataclass
class Speed:
    """Steps of one split that were timed in this attempt, and the seconds that they took."""

    steps: int = 0
    seconds: float = 0.0


class Pace:
    """Times the steps of each split, its first one of the attempt left out: that one gets
    everything ready.

    Args:
        plan: every phase.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._speeds: dict[str, Speed] = {}
        self._later: Counter[str] = Counter()
        self._phase: Phase | None = None
        self._mark = 0
        self._since = 0.0
        self._warm = True

    def enter(self, phase: Phase, step: int, plan: Plan) -> bool:
        """Begin a phase at `step`; return whether its first step is to be told to `begin`."""
        self._plan = plan
        self._phase = phase
        self._later = Counter()
        for later in plan.phases[phase.index + 1 :]:
            self._later[later.split] += later.steps
        self._mark = step
        self._since = time.perf_counter()
        self._warm = phase.split in self._speeds
        return not self._warm

    def begin(self, step: int) -> None:
        """Count from here on: the first step of a split is done."""
        if not self._warm:
            self._mark = step
            self._since = time.perf_counter()
            self._warm = True

    def leave(self) -> None:
        """Add the phase to what is known of its split."""
        if self._phase is None:
            return
        now = self._now(self._phase.steps)
        speed = self._speeds.setdefault(self._phase.split, Speed())
        speed.steps += now.steps
        speed.seconds += now.seconds
        self._phase = None

    def recent(self, step: int) -> tuple[float, float]:
        """Return the steps of this phase that were timed, per second, and the seconds since it
        began or was warm."""
        now = self._now(step)
        return (now.steps / now.seconds if now.steps and now.seconds else 0.0), now.seconds

    def left(self, step: int) -> tuple[float, float] | None:
        """Return the seconds that are left of the phase and of the run; None while too little was
        timed."""
        phase = self._phase
        if phase is None:
            return None
        here = self._per_step(phase.split, step)
        if here is None:
            return None
        seconds = (phase.steps - step) * here
        later = 0.0
        for split, steps in self._later.items():
            each = self._per_step(split, step)
            later += steps * (here if each is None else each)
        return seconds, seconds + later

    def timed(self, step: int) -> Speed:
        """Return what was timed of training so far."""
        known = self._speeds.get(TRAIN, Speed())
        if self._phase is None or not self._phase.is_train:
            return known
        now = self._now(step)
        return Speed(known.steps + now.steps, known.seconds + now.seconds)

    def _now(self, step: int) -> Speed:
        if not self._warm:
            return Speed()
        return Speed(step - self._mark, time.perf_counter() - self._since)

    def _per_step(self, split: str, step: int) -> float | None:
        """Return the seconds of a step; a split that has not been seen yet takes as long as the one
        under way."""
        known = self._speeds.get(split, Speed())
        steps = known.steps
        seconds = known.seconds
        if self._phase is not None and split == self._phase.split:
            now = self._now(step)
            steps, seconds = steps + now.steps, seconds + now.seconds
        if steps:
            return seconds / steps
        return None
