"""Decides which runs are promoted, as a function of their measurements and of nothing else.

All runs of a bracket reach a rung before any of them is promoted. Asynchronous halving (ASHA)
promotes a run as soon as it is among the best of those that happen to be there, so that another
order of arrival promotes other runs. Here a killed sweep, or one with more workers, promotes the
same runs, and workers wait at the end of a rung.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phasetrain.addons.experiments.sweep.prune.rungs import count_hyperband_runs
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings


@dataclass(frozen=True)
class Outcome:
    """The result of a run at a rung.

    Attributes:
        is_known: whether it has been there, or failed on the way.
        score: its metric, larger is better; None if it failed or the metric is not finite.
    """

    is_known: bool
    score: float | None = None


PENDING = Outcome(is_known=False)
FAILED = Outcome(is_known=True)

Lookup = Callable[[str, int], Outcome]
"""Name of a run and number of a rung, from 0 -> the outcome of the run there."""


@dataclass(frozen=True)
class Bracket:
    """Runs that are compared with one another.

    Attributes:
        first: its first rung, from 0; rungs have the same numbers in all brackets.
        runs: names of the runs.
    """

    first: int
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """The comparison at one rung of a bracket.

    Attributes:
        rung: number of the rung, from 0.
        scores: name -> score, larger is better, the best run first; None for failed runs.
        promoted: names of the runs that continue.
    """

    rung: int
    scores: dict[str, float | None]
    promoted: tuple[str, ...]


@dataclass(frozen=True)
class Standing:
    """How far a bracket has come.

    Attributes:
        decisions: one for each rung that all runs have reached.
        rung: the rung that is compared next; the number of rungs for the end of the runs.
        waiting: names of the runs that have to get there first; empty once all is decided.
    """

    decisions: tuple[Decision, ...]
    rung: int
    waiting: tuple[str, ...]


def decide(bracket: Bracket, rungs: int, eta: int, look_up: Lookup) -> Standing:
    """Promote the best runs from rung to rung, as far as the results are known.

    One of `eta` runs is promoted, rounded down, and at least one. Failed runs count, and are never
    promoted. Of equal scores the run with the smaller name is the better one.

    Args:
        bracket: the runs.
        rungs: number of rungs before the end of the runs.
        eta: one of `eta` runs is promoted.
        look_up: returns the outcome of a run at a rung.
    """
    runs = bracket.runs
    decisions: list[Decision] = []
    for rung in range(bracket.first, rungs + 1):
        outcomes = {name: look_up(name, rung) for name in runs}
        waiting = tuple(name for name in runs if not outcomes[name].is_known)
        if waiting or rung == rungs:
            return Standing(tuple(decisions), rung, waiting)
        # Compared at one update: the best value so far would favour runs that are tested often.
        scores = {name: outcome.score for name, outcome in outcomes.items()}
        ranked = sorted(runs, key=lambda name: _rank(name, scores[name]))
        most = max(1, len(runs) // eta)
        promoted = tuple(name for name in ranked[:most] if scores[name] is not None)
        decisions.append(Decision(rung, {name: scores[name] for name in ranked}, promoted))
        runs = promoted
    raise AssertionError("the loop returns at the end of the runs")


def make_brackets(settings: PruneSettings, levels: int, runs: Sequence[str]) -> list[Bracket]:
    """Divide runs into brackets: a single one for `halving`, else the brackets of Hyperband.

    Args:
        settings: how the sweep is pruned.
        levels: number of rungs before the end of the runs.
        runs: names of all runs. A longer list that begins with the same runs has them in the same
            brackets.
    """
    members: dict[int, list[str]] = {}
    for number, name in enumerate(runs):
        members.setdefault(find_bracket(settings, levels, number), []).append(name)
    return [Bracket(first, tuple(members[first])) for first in sorted(members)]


def find_bracket(settings: PruneSettings, levels: int, number: int) -> int:
    """Return the first rung of the bracket that a run belongs to, by its number, from 0."""
    if settings.name == "halving":
        return 0
    sizes = count_hyperband_runs(levels, settings.eta)
    # Repeated, so that a larger number of runs leaves each run in its bracket.
    position = number % sum(sizes)
    for first, size in enumerate(sizes):
        if position < size:
            return first
        position -= size
    raise AssertionError("a position is below the sum of the sizes")


def _rank(name: str, score: float | None) -> tuple[bool, float, str]:
    if score is None:
        return True, 0.0, name
    return False, -score, name
