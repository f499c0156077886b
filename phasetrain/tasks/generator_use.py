"""Seeds the generators that the passes of a task draw from."""

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phasetrain.runtime.machine import GeneratorWatch, reseed, reseed_all

log = logging.getLogger(__name__)

WATCHED_STEPS = 2
"""Steps of each phase in which it is watched whether Python's or NumPy's generator is used."""


class GeneratorUse:
    """Seeds the global generators before each pass: torch's always, Python's and NumPy's if the
    parts draw from them.

    Seeding all three costs five times as much as seeding torch's alone, and few models, losses and
    hooks draw from the others. So the first steps of each phase are seeded and watched, and
    once a pass draws, all later ones are seeded. That is part of the checkpoint, since a part may
    draw in some steps only.

    Attributes:
        draws: whether a pass has drawn from Python's or NumPy's generator.
        watches: whether the next pass is watched.
        is_before_pass: whether the generators are seeded for a custom step, which may draw before
            its first pass.
    """

    is_optional = True  # checkpoints of 0.1 lack it

    def __init__(self) -> None:
        self.draws = False
        self.watches = False
        self.late = False
        self._steps = 0
        self._before: Any = None
        self.is_before_pass = False
        self._watch = GeneratorWatch()

    def begin_phase(self) -> None:
        """Watch the next steps."""
        self._steps = 0
        self.watches = not self.draws

    def seed(self, seed: int) -> None:
        """Seed the generators for a pass."""
        if self.is_before_pass:
            self.is_before_pass = False
            self.check_pass()
        if self.draws:
            reseed_all(seed)
        elif self.watches:
            reseed_all(seed)
            self._before = _read_states()
        else:
            reseed(seed)
            # Others may have drawn since the last pass, such as a dataset or a hook that observes.
            self._watch.start_between_passes(seed)

    def check_pass(self) -> None:
        """Find out whether anything was drawn since `seed`, and warn if that was not seeded."""
        if self.draws:
            return
        if self.watches:
            self.draws = self._before is not None and _read_states() != self._before
        elif self._watch.is_used():
            self.draws = True
            self.late = True
            log.warning(
                "the model, the loss or a hook has drawn from Python's or NumPy's generator for "
                "the first time, in the middle of a phase: this step is not exact, and a resume "
                "from before it would draw other numbers; all later steps are exact. Draw from "
                "torch's generator, or once in the first step of each phase (generators.late_draw)"
            )

    def finish_step(self) -> None:
        """Count a watched step."""
        self._steps += 1
        self.watches = not self.draws and self._steps < WATCHED_STEPS
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Return whether parts draw."""
        if self.late:
            return {"draws": True, "late": True}
        if self.draws:
            return {"draws": True}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.draws = bool(state.get("draws", False))
        self.late = bool(state.get("late", False))

    def rank_state(self) -> dict[str, Any]:
        """Return whether parts of this rank draw."""
        return self.state_dict()

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `rank_state`."""
        self.load_state_dict(state)

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Seed all generators if one of the ranks did."""
        self.draws = any(state.get("draws", False) for state in states)
        self.late = any(state.get("late", False) for state in states)


def _read_states() -> tuple[Any, ...]:
    generator_name, words, *rest = np.random.get_state()
    return random.getstate(), generator_name, np.asarray(words).tobytes(), *rest
