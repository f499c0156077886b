"""The inverse of an order: the positions and the updates that contain given samples."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from phasetrain.data.samplers.permutation import Indices
from phasetrain.engine.plan import Phase, Plan

BLOCK = 2**18
"""Positions that a search computes together."""


class SlicedPass(Protocol):
    """A pass as `phasetrain.data.samplers.phase_sampler.Pass` defines it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, ordinals: slice, /) -> Indices:
        """Return the indices at `[begin:end]`."""
        ...


class PassFinder(Protocol):
    """A sampler that knows the pass of a phase."""

    def find_pass(self, phase: Phase, /) -> SlicedPass:
        """Return the indices of the epoch of a phase."""
        ...


def find_positions(found: SlicedPass, indices: Indices) -> Indices:
    """Return all positions of some samples in a pass, ascending, int64.

    A pass that can be inverted takes constant time per sample: its method `find(indices)` returns
    the positions of some samples in any order, int64, and none for samples that do not occur. Any
    other pass is searched: it is computed once, in blocks.
    """
    find = getattr(found, "find", None)
    if find is not None:
        return np.sort(find(indices))
    parts = []
    for begin in range(0, len(found), BLOCK):
        # In blocks, because a pass may be longer than the memory.
        block = found[begin : begin + BLOCK]
        parts.append(begin + np.flatnonzero(np.isin(block, indices)))
    if not parts:
        return np.empty(0, dtype=np.int64)
    return np.concatenate(parts)


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
