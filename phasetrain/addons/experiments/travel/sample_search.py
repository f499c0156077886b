"""Searches the samples of an update that make a value of the run rise, by leaving groups out."""

from collections.abc import Sequence
from functools import partial
from math import inf

import numpy as np

from phasetrain.addons.experiments.travel.forks import (
    Fork,
    Forks,
    OverBudgetError,
    SampleScore,
    without_samples,
)
from phasetrain.runtime.format import join_first

Found = tuple[Sequence[SampleScore], Fork]
"""Samples, and the fork without them, in which the spike is gone."""


def name_samples(scores: Sequence[SampleScore]) -> str:
    """Return samples as text."""
    names = join_first([score.name for score in scores], 4)
    return f"sample {names}" if len(scores) == 1 else f"{len(scores)} samples ({names})"


class SampleSearch:
    """Searches the smallest group of samples of an update without which there is no spike.

    Args:
        forks: trains the forks.
        update: the update.
    """

    def __init__(self, forks: Forks, update: int) -> None:
        self._forks = forks
        self._update = update
        # The damage of a sample to the weights shows in later updates, and grows with its gradient.
        self._acts_later = update < forks.goal.update
        self._scores: list[SampleScore] = []

    def find(self) -> Found | None:
        """Return the samples; None if there are none, or if the budget does not allow to find
        them."""
        try:
            self._scores = self._forks.measure(self._update)
        except OverBudgetError:
            self._forks.skipped.append(f"update {self._update} without one of its samples")
            return None
        self._scores.sort(key=self._rank)
        group = self._find_group()
        return group if group is not None and self._are_special(group[0]) else None

    def _rank(self, score: SampleScore) -> float:
        value = score.gradient_norm if self._acts_later else score.loss
        return -float(np.nan_to_num(value, nan=inf))  # what is not a number comes first

    def _find_group(self) -> Found | None:
        scores = self._scores
        first = self._leave_out(scores[:1])
        if first is None or first.removes:
            return None if first is None else (scores[:1], first)
        # A sample may spoil the loss of others and have a low one itself, as with batch norm.
        half = len(scores) // 2
        for ordered in (scores, scores[half:] + scores[:half]):
            size = half if ordered is scores else len(scores) - half
            without = self._leave_out(ordered[:size]) if size > 1 else None
            if without is not None and without.removes:
                # The first sample alone was not enough.
                return self._narrow(ordered[:size], without, low=int(ordered is scores))
        return None

    def _narrow(self, group: Sequence[SampleScore], without: Fork, low: int) -> Found:
        """Return the smallest part of a group without which there is no spike, a single sample if
        possible; without the first `low` samples there is still a spike."""
        high = len(group)
        while high - low > 1:
            middle = (low + high) // 2
            fork = self._leave_out(group[:middle])
            if fork is None:
                break
            if fork.removes:
                high, without = middle, fork
            else:
                low = middle
        last = group[high - 1 : high]
        alone = without if high == 1 else self._leave_out(last)
        if alone is not None and alone.removes:
            return last, alone
        return group[:high], without

    def _leave_out(self, chosen: Sequence[SampleScore]) -> Fork | None:
        places = [score.place for score in chosen]
        text = f"without {name_samples(chosen)}"
        change = partial(without_samples, places)
        return self._forks.fork(self._update, text, change, further=len(chosen) == 1)

    def _are_special(self, chosen: Sequence[SampleScore]) -> bool:
        """Return whether it is these samples that matter, not the state or any change at all."""
        others = [score for score in self._scores if score not in chosen]
        if not self._acts_later or not others:
            return True
        # Any change of an unstable update may end elsewhere.
        control = self._leave_out(others[-len(chosen) :])
        return control is not None and not control.removes
