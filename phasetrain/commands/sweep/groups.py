"""Runs of a sweep that repeat one config with other folds or seeds: their mean and spread."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasetrain.commands.sweep.sweep_run import SweepRun
from phasetrain.runs.direction import Objective
from phasetrain.runs.records import parse_number
from phasetrain.runtime.format import format_metric

REPEATED = ("fold", "seed")
"""Last words of keys whose values repeat a config instead of changing it."""


@dataclass(frozen=True)
class Group:
    """The runs of one config.

    Attributes:
        swept: swept overrides that all of the runs share, key -> value as text.
        over: the other swept keys, such as `RUN.seed`.
        runs: names of the runs, in the order of the values of these keys.
        count: number of runs with a value of the metric.
        mean: mean of their best values; None without any.
        std: sample standard deviation of their best values; None with fewer than two.
    """

    swept: Mapping[str, str]
    over: tuple[str, ...]
    runs: tuple[str, ...]
    count: int
    mean: float | None
    std: float | None

    @property
    def spread(self) -> str:
        """Mean and standard deviation as text."""
        if self.mean is None:
            return "-"
        if self.std is None:
            return format_metric(self.mean)
        return f"{format_metric(self.mean)} ± {format_metric(self.std)}"


def is_repeated(key: str) -> bool:
    """Check whether the values of a key repeat a config: folds and seeds."""
    return key.rpartition(".")[2] in REPEATED


def group_runs(runs: Sequence[SweepRun], objective: Objective) -> list[Group]:
    """Return a group per config, the best mean first; none if no fold or seed is swept."""
    found: dict[tuple[tuple[str, str], ...], list[SweepRun]] = {}
    over = tuple(dict.fromkeys(key for run in runs for key in run.swept if is_repeated(key)))
    if not over:
        return []
    for run in runs:
        shared = tuple((key, value) for key, value in run.swept.items() if key not in over)
        found.setdefault(shared, []).append(run)
    groups = [_make_group(dict(shared), over, each, objective) for shared, each in found.items()]
    return sorted(groups, key=lambda group: _rank_mean(group, objective))


def _make_group(
    swept: Mapping[str, str],
    over: tuple[str, ...],
    runs: Sequence[SweepRun],
    objective: Objective,
) -> Group:
    ordered = sorted(runs, key=lambda run: [sort_key(run.swept.get(key, "")) for key in over])
    values = [
        run.best for run in ordered if run.best is not None and run.metric == objective.metric
    ]
    mean = std = None
    if values:
        mean = statistics.fmean(values)
    if len(values) > 1:
        std = statistics.stdev(values)
    return Group(swept, over, tuple(run.name for run in ordered), len(values), mean, std)


def _rank_mean(group: Group, objective: Objective) -> tuple[bool, float]:
    if group.mean is None:
        return True, 0.0
    return False, -objective.direction.score(group.mean)


def sort_key(text: str) -> tuple[bool, float, str]:
    """Return a sort key of a swept value: numbers by size before words by letters."""
    value = parse_number(text)
    if value != value:  # NaN: no number
        return True, 0.0, text
    return False, value, text
