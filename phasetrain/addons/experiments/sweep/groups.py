"""Runs of a sweep that repeat one config with other folds or seeds: mean, spread and differences.

Runs of different configs with the same fold and seed form a pair: they have the same initial
weights, order of the samples and augmentation, so that their difference varies less than either
value.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phasetrain.addons.experiments.options import ComparisonSettings
from phasetrain.addons.experiments.statistics import (
    Bounds,
    Summary,
    adjust_p_values,
    compare_pairs,
    count_pairs,
    summarize_sample,
)
from phasetrain.addons.experiments.sweep.bounds import find_bounds
from phasetrain.addons.experiments.sweep.override_text import (
    SweepOverrides,
    is_repeated,
    split_words,
)
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun, list_metrics
from phasetrain.errors import ConfigError
from phasetrain.runs.direction import Objective
from phasetrain.runs.records import parse_number
from phasetrain.runtime.format import format_metric, join_first

ABSENT = "not swept"
"""State of a repetition that other configs have and this one has not."""


def check_comparison(comparison: ComparisonSettings, words: SweepOverrides) -> None:
    """Check that settings fit a sweep.

    Raises:
        ConfigError: the baseline is not one config of the grid (`sweep.baseline`), or the
            difference is not greater than 0 (`sweep.detect`).
    """
    if comparison.detect is not None and not 0 < comparison.detect < math.inf:
        raise ConfigError(
            f"--detect {comparison.detect:g}: expected a difference of the metric greater than 0",
            code="sweep.detect",
        )
    for flag, value in (("--baseline", comparison.baseline), ("--detect", comparison.detect)):
        if value and not any(is_repeated(override.key_or_group) for override in words.swept):
            raise ConfigError(
                f"{flag}: configs are compared over seeds, and no seeds are swept; add "
                "'RUN.seed=seeds(5)'",
                code=f"sweep.{flag.removeprefix('--')}",
            )
    if comparison.baseline:
        _check_baseline(comparison.baseline, words)


def _check_baseline(baseline: Sequence[str], words: SweepOverrides) -> None:
    flag = f"--baseline {' '.join(baseline)}"
    if words.sweeper != "basic":
        raise ConfigError(
            f"{flag}: a sampler chooses the configs of this sweep; leave the flag out, and "
            "configs are compared with the best one",
            code="sweep.baseline",
        )
    configs = words.list_configs()
    if find_config(map(split_words, configs), baseline) is None:
        listed = join_first((" ".join(config) for config in configs), 8)
        raise ConfigError(
            f"{flag}: expected the values of exactly one config of the sweep; they are: {listed}",
            code="sweep.baseline",
        )


@dataclass(frozen=True)
class Comparison:
    """Differences of a config from the baseline, over the folds and seeds of both.

    Attributes:
        pairs: number of folds and seeds with a value in both.
        mean, std, stderr: of the differences, config minus baseline; None with too few pairs.
        low, high: bounds of the 95 % confidence interval of the mean difference.
        p_value: of the paired t test; None with fewer than two pairs.
        p_adjusted: the same after Holm's correction for all configs of the sweep.
        correlation: of the paired values.
        variance_ratio: variance of the paired differences over the unpaired one; with 0.1, an
            unpaired comparison needs ten times as many runs.
        pairs_needed: pairs with which a test at level 0.05 finds a difference as large as the mean
            one with a probability of 0.8; None without a difference or without a spread.
        pairs_to_detect: the same for a given difference; None if none is given.
    """

    pairs: int
    mean: float | None = None
    std: float | None = None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    correlation: float | None = None
    variance_ratio: float | None = None
    pairs_needed: int | None = None
    pairs_to_detect: int | None = None


@dataclass(frozen=True)
class ConfigGroup:
    """The runs of one config.

    Attributes:
        swept: swept overrides that all of the runs share, key -> value as text.
        over: the other swept keys, such as `RUN.seed`.
        runs: names of the runs, in the order of the values of these keys.
        count: number of runs with a finite value of the metric.
        mean: mean of their best values; None without any.
        std: sample standard deviation of their best values; None with fewer than two.
        stderr: standard error of the mean.
        low, high: bounds of the 95 % confidence interval of the mean.
        values: repetition, such as `RUN.seed=0` -> best value of its run.
        missing: repetition -> state of its run, if it has no value.
        is_baseline: whether the other configs are compared with this one.
        difference: comparison with the baseline; None for itself and without a baseline.
        metrics: other test metric -> mean and spread of its values, each measured where the run has
            its best value.
        last: mean and spread of their latest values. The best values are chosen by the samples that
            measure them, so as estimates they are too good.
    """

    swept: Mapping[str, str]
    over: tuple[str, ...]
    runs: tuple[str, ...]
    count: int
    mean: float | None
    std: float | None
    stderr: float | None
    low: float | None
    high: float | None
    values: Mapping[str, float]
    missing: Mapping[str, str]
    is_baseline: bool = False
    difference: Comparison | None = None
    metrics: Mapping[str, Summary] = field(default_factory=dict)
    last: Summary = field(default_factory=lambda: summarize_sample([]))

    @property
    def words(self) -> str:
        """The overrides that make the config, as text."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items())

    @property
    def spread(self) -> str:
        """Mean and standard deviation as text."""
        return format_spread(self.mean, self.std)


def format_spread(mean: float | None, std: float | None) -> str:
    """Return a mean and a standard deviation as text."""
    if mean is None:
        return "-"
    if std is None:
        return format_metric(mean)
    return f"{format_metric(mean)} ± {format_metric(std)}"


def group_runs(
    runs: Sequence[SweepRun],
    objective: Objective,
    comparison: ComparisonSettings,
) -> list[ConfigGroup]:
    """Return a group per config, the best mean first; none if no fold or seed is swept."""
    runs_by_config: dict[tuple[tuple[str, str], ...], list[SweepRun]] = {}
    over = tuple(dict.fromkeys(key for run in runs for key in run.swept if is_repeated(key)))
    if not over:
        return []
    for run in runs:
        shared = tuple((key, value) for key, value in run.swept.items() if key not in over)
        runs_by_config.setdefault(shared, []).append(run)
    # Of all configs together: a run that one of them lacks is listed as missing.
    repetitions = _list_repetitions(runs, over)
    bounds = find_bounds(objective.metric, runs)
    groups = [
        _make_group(dict(shared), over, each, objective, repetitions, bounds)
        for shared, each in runs_by_config.items()
    ]
    groups.sort(key=lambda group: _rank_mean(group, objective))
    return _compare_groups(groups, comparison, bounds)


def find_config(
    configs: Iterable[Mapping[str, str]], words: Sequence[str]
) -> Mapping[str, str] | None:
    """Return the only config that has all given values; None if no config or several have them.

    Args:
        configs: swept key -> value as text, without folds and seeds.
        words: overrides; swept keys that they leave out may have any value.
    """
    wanted = split_words(words)
    matching = [
        config
        for config in configs
        if all(key in config and _is_same(config[key], value) for key, value in wanted.items())
    ]
    if len(matching) == 1:
        return matching[0]
    return None


def sort_key(text: str) -> tuple[bool, float, str]:
    """Return a sort key of a swept value: numbers by size before words by letters."""
    value = parse_number(text)
    if value != value:  # NaN: no number
        return True, 0.0, text
    return False, value, text


def _list_repetitions(runs: Sequence[SweepRun], over: Sequence[str]) -> list[str]:
    """Return the folds and seeds of a sweep as text, in the order of their values."""
    repetitions = sorted(
        {tuple(run.swept.get(key, "") for key in over) for run in runs},
        key=lambda values: [sort_key(value) for value in values],
    )
    return [_join_words(zip(over, values, strict=True)) for values in repetitions]


def _name_repetition(run: SweepRun, over: Sequence[str]) -> str:
    return _join_words((key, run.swept.get(key, "")) for key in over)


def _join_words(pairs: Iterable[tuple[str, str]]) -> str:
    return " ".join(f"{key}={value}" for key, value in pairs)


def _make_group(
    swept: Mapping[str, str],
    over: tuple[str, ...],
    runs: Sequence[SweepRun],
    objective: Objective,
    repetitions: Sequence[str],
    bounds: Bounds,
) -> ConfigGroup:
    by_name = {_name_repetition(run, over): run for run in runs}
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name in repetitions:
        run = by_name.get(name)
        if run is None:
            missing[name] = ABSENT
        elif run.best is None or run.metric != objective.metric or not math.isfinite(run.best):
            missing[name] = run.state
        else:
            values[name] = run.best
    summary = summarize_sample(list(values.values()), bounds=bounds)
    return ConfigGroup(
        swept,
        over,
        runs=tuple(by_name[name].name for name in repetitions if name in by_name),
        **vars(summary),
        values=values,
        missing=missing,
        metrics={
            metric: summarize_sample(
                [
                    by_name[name].metrics[metric]
                    for name in values
                    if math.isfinite(by_name[name].metrics.get(metric, math.nan))
                ]
            )
            for metric in list_metrics(runs)
        },
        last=summarize_sample(
            [
                last
                for name in values
                if (last := by_name[name].last) is not None and math.isfinite(last)
            ],
            bounds=bounds,
        ),
    )


def _compare_groups(
    groups: Sequence[ConfigGroup], comparison: ComparisonSettings, bounds: Bounds
) -> list[ConfigGroup]:
    """Return the groups with their differences from a baseline, by default the best one.

    A config with failed runs is the best one only if all configs have failed runs: without the
    missing seeds, its mean may be too good.
    """
    most = max(group.count for group in groups)
    config: Mapping[str, str] | None = next(group.swept for group in groups if group.count == most)
    if comparison.baseline:
        config = find_config([group.swept for group in groups], comparison.baseline)
    baseline = next((group for group in groups if group.swept == config), None)
    if baseline is None or baseline.mean is None:
        return list(groups)
    compared = []
    for group in groups:
        if group is baseline:
            compared.append(replace(group, is_baseline=True))
        else:
            difference = _compare(group, baseline, comparison.detect, bounds)
            compared.append(replace(group, difference=difference))
    return _correct_p_values(compared)


def _compare(
    group: ConfigGroup, baseline: ConfigGroup, detect: float | None, bounds: Bounds
) -> Comparison:
    result = compare_pairs(group.values, baseline.values, bounds=bounds)
    summary = result.summary
    needed = None
    to_detect = None
    if summary.mean is not None and summary.std:
        needed = count_pairs(summary.mean, summary.std)
        to_detect = count_pairs(detect or 0.0, summary.std)
    return Comparison(
        summary.count,
        summary.mean,
        summary.std,
        summary.stderr,
        summary.low,
        summary.high,
        p_value=result.p_value,
        correlation=result.correlation,
        variance_ratio=result.variance_ratio,
        pairs_needed=needed,
        pairs_to_detect=to_detect,
    )


def _correct_p_values(groups: Sequence[ConfigGroup]) -> list[ConfigGroup]:
    """Return the groups with p values after Holm's correction."""
    p_values = {
        index: group.difference.p_value
        for index, group in enumerate(groups)
        if group.difference is not None and group.difference.p_value is not None
    }
    adjusted = dict(zip(p_values, adjust_p_values(list(p_values.values())), strict=True))
    corrected = list(groups)
    for index, p_value in adjusted.items():
        difference = groups[index].difference
        if difference is not None:
            corrected[index] = replace(
                groups[index], difference=replace(difference, p_adjusted=p_value)
            )
    return corrected


def _rank_mean(group: ConfigGroup, objective: Objective) -> tuple[bool, float]:
    if group.mean is None:
        return True, 0.0
    return False, -objective.direction.score(group.mean)


def _is_same(first: str, second: str) -> bool:
    """Return whether two values are equal as numbers or as text."""
    number = parse_number(first)
    # False for NaN, which stands for text that is not a number.
    if number == number:
        return number == parse_number(second)
    return first.strip("'\"") == second.strip("'\"")
