"""Finds the updates of a plan that contain given samples."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from phasetrain.data.samplers.locate import EpochOrder, find_positions
from phasetrain.data.samplers.permutation import Indices
from phasetrain.engine.plan import Phase, Plan


class PassFinder(Protocol):
    """A sampler that knows the pass of a phase."""

    def find_pass(self, phase: Phase, /) -> EpochOrder:
        """Return the indices of the epoch of a phase."""
        ...


def find_updates(plan: Plan, sampler: PassFinder, indices: Indices) -> Iterator[int]:
    """Yield the updates of a plan that contain one of some samples, from 1, ascending, each once.

    An epoch is looked at when the updates before it are used up, so the first update costs no more
    than the epochs before it.

    Args:
        plan: the phases of the run.
        sampler: draws of the training data.
        indices: ids of the samples, int64 `(N,)`.
    """
    phases = plan.phases
    epoch = -1
    positions = np.empty(0, dtype=np.int64)
    for index in np.flatnonzero(phases.is_train).tolist():
        phase = phases[index]
        if phase.epoch != epoch:
            positions = find_positions(sampler.find_pass(phase), indices)
            epoch = phase.epoch
        inside = positions[(positions >= phase.offset) & (positions < phase.offset + phase.samples)]
        steps = np.unique((inside - phase.offset) // phase.batch_size)
        before = plan.updates_before(index)
        for step in steps.tolist():
            yield before + step + 1
