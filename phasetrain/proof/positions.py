"""Positions in a run, as traces use and messages show them."""

from collections.abc import Sequence
from dataclasses import dataclass

StepPosition = tuple[int, int]
"""Number of completed phases, and of completed steps in the current one."""


@dataclass(frozen=True)
class PhaseLabel:
    """The facts of a phase in a message: its split, its epoch, its steps, whether it trains."""

    split: str
    epoch: int
    steps: int
    is_train: bool


def describe_position(position: StepPosition, phases: Sequence[PhaseLabel]) -> str:
    """Return a position as text."""
    index, step = position
    if step == 0:  # the position after a phase is the start of the next one
        index -= 1
        phase = phases[index]
        return f"the end of phase {index} ({phase.split}, epoch {phase.epoch})"
    phase = phases[index]
    total = sum(before.steps for before in phases[:index]) + step
    within = f"step {step} of phase {index}, {phase.split}, epoch {phase.epoch}"
    return f"step {total} of the run ({within})"


def count_updates(position: StepPosition, phases: Sequence[PhaseLabel]) -> int:
    """Return the number of updates up to a position."""
    index, step = position
    updates = sum(phase.steps for phase in phases[:index] if phase.is_train)
    if index < len(phases) and phases[index].is_train:
        return updates + step
    return updates
