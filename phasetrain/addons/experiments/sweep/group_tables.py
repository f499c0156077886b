"""Tables of configs that a sweep repeats with other folds or seeds."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from statistics import median

from phasetrain.addons.experiments.statistics import (
    LEVEL,
    MOST_PAIRS,
    POWER,
    Summary,
    count_pairs,
)
from phasetrain.addons.experiments.sweep.groups import Comparison, ConfigGroup, format_spread
from phasetrain.addons.experiments.sweep.results import MOST_METRICS, shorten_number
from phasetrain.runtime.format import format_metric, join_first, shorten

Table = tuple[str, list[str], list[list[str]]]
"""Title, columns and rows."""

SIZES = 4
"""Number of differences in the table of seeds needed."""

MOST_MISSING = 4
"""Number of missing folds and seeds that are named for a config."""

INTERVAL = f"{100 * LEVEL:.0f} % interval"


def make_mean_table(groups: Sequence[ConfigGroup], metric: str, *, is_full: bool = False) -> Table:
    """Return the table of mean, spread and confidence interval of each config.

    Args:
        groups: configs of a sweep.
        metric: the metric that they are compared by.
        is_full: whether to number the configs, as plots do.
    """
    keys = _list_keys(groups)
    metrics = _list_metrics(groups)
    rank = ["config"] if is_full else []
    # With one measurement per run, or the best one at the end, the column would say the same twice.
    last = ["last"] if any(group.last.mean not in (None, group.mean) for group in groups) else []
    rows = [
        [
            *([f"#{rank}"] if is_full else []),
            *_format_config(group, keys),
            group.spread,
            format_interval(group.low, group.high),
            *([_format_summary(group.last)] if last else []),
            *(_format_summary(group.metrics.get(name)) for name in metrics[:MOST_METRICS]),
            f"{group.count}/{len(group.runs)}",
        ]
        for rank, group in enumerate(groups, start=1)
    ]
    title = f"mean and standard deviation over {', '.join(groups[0].over)}"
    best = f"best {metric}".strip()
    return title, [*rank, *keys, best, INTERVAL, *last, *metrics[:MOST_METRICS], "runs"], rows


def make_difference_table(
    groups: Sequence[ConfigGroup], detect: float | None = None, *, is_full: bool = False
) -> Table | None:
    """Return the table of paired differences from the baseline; None if nothing can be compared.

    Args:
        groups: configs of a sweep.
        detect: difference for which the seeds needed are shown, instead of the measured one.
        is_full: whether to show the standard deviation and the gain by pairing too, and the numbers
            of the configs, as in plots.
    """
    baseline = find_baseline(groups)
    compared = [
        (rank, group, group.difference)
        for rank, group in enumerate(groups, start=1)
        if group.difference is not None
    ]
    if baseline is None or not any(difference.pairs for _, _, difference in compared):
        return None
    keys = _list_keys(groups)
    needed = f"{name_pairs(groups)} needed"
    if detect is not None:
        needed = f"{name_pairs(groups)} for {detect:g}"
    columns = ["difference", INTERVAL, "p (Holm)", "pairs", needed]
    if is_full:
        columns += ["std", "correlation", "variance ratio"]
    rows = []
    for rank, group, difference in compared:
        row = [*_format_config(group, keys), *_format_difference(difference, detect)]
        if is_full:
            row = [
                f"#{rank}",
                *row,
                _format_optional(difference.std),
                _format_optional(difference.correlation, "{:.2f}"),
                _format_optional(difference.variance_ratio, "{:.3f}"),
            ]
        rows.append(row)
    title = f"difference from {shorten(baseline.words, 60)}, paired by {', '.join(baseline.over)}"
    if is_full:
        title += "; variance ratio: of these differences over those of unpaired runs"
    return title, [*(["config"] if is_full else []), *keys, *columns], rows


def make_needs_table(groups: Sequence[ConfigGroup], detect: float | None = None) -> Table | None:
    """Return the table of pairs needed to find differences of given sizes; None without spreads.

    Args:
        groups: configs of a sweep.
        detect: a difference to include.
    """
    spreads = [
        (group, group.difference.std)
        for group in groups
        if group.difference and group.difference.std
    ]
    if not spreads:
        return None
    sizes = choose_sizes(median(std for _, std in spreads))
    if detect is not None:
        sizes = sorted({*sizes, abs(detect)})
    keys = _list_keys(groups)
    rows = [
        [*_format_config(group, keys), *(_format_needed(count_pairs(size, std)) for size in sizes)]
        for group, std in spreads
    ]
    title = (
        f"{name_pairs(groups)} with which a paired test at level {1 - LEVEL:.2g} finds a "
        f"difference of this size with a probability of {100 * POWER:.0f} %"
    )
    return title, [*keys, *(f"{size:g}" for size in sizes)], rows


def choose_sizes(std: float) -> list[float]:
    """Return round differences from a quarter of a standard deviation upwards.

    Example:
        >>> choose_sizes(0.01)
        [0.005, 0.01, 0.02, 0.05]
    """
    power = math.floor(math.log10(std / 4))
    numbers = [
        float(f"{digit}e{exponent}")
        for exponent in (power, power + 1, power + 2)
        for digit in (1, 2, 5)
    ]
    return [number for number in numbers if number >= std / 4][:SIZES]


def describe_missing(groups: Sequence[ConfigGroup]) -> list[str]:
    """Return a sentence per config whose runs do not all have a value."""
    return [
        f"no value of {group.words or 'the config'} for "
        + join_first((f"{name} ({state})" for name, state in group.missing.items()), MOST_MISSING)
        for group in groups
        if group.missing
    ]


def format_configs_csv(groups: Sequence[ConfigGroup]) -> str:
    """Return the configs as CSV, with a column per swept key; differences are from the baseline."""
    keys = _list_keys(groups)
    columns = ["count", "mean", "std", "stderr", "low", "high", "is_baseline"]
    last = ["last_mean", "last_std"]
    compared = [field.name for field in fields(Comparison)]
    text = io.StringIO()
    writer = csv.writer(text)
    metrics = _list_metrics(groups)
    names = [f"{metric} {name}" for metric in metrics for name in ("mean", "std")]
    writer.writerow([*keys, *columns, *(f"difference_{name}" for name in compared), *last, *names])
    for group in groups:
        content = asdict(group)
        difference = content["difference"] or {}
        cells = [group.swept.get(key, "") for key in keys]
        cells += [content[name] for name in columns]
        cells += [difference.get(name, "") for name in compared]
        cells += [content["last"]["mean"], content["last"]["std"]]
        for metric in metrics:
            summary = content["metrics"].get(metric) or {}
            cells += [summary.get("mean", ""), summary.get("std", "")]
        writer.writerow(cells)
    return text.getvalue()


def find_baseline(groups: Sequence[ConfigGroup]) -> ConfigGroup | None:
    """Return the config that the others are compared with; None if it has no value."""
    return next((group for group in groups if group.is_baseline), None)


def name_pairs(groups: Sequence[ConfigGroup]) -> str:
    """Return the word for the members of pairs: seeds, or pairs if folds are swept too."""
    if all(key.endswith("seed") for key in groups[0].over):
        return "seeds"
    return "pairs"


def format_interval(low: float | None, high: float | None) -> str:
    """Return a confidence interval as text, `-` without one."""
    if low is None or high is None:
        return "-"
    return f"{format_metric(low)} to {format_metric(high)}"


def _list_keys(groups: Sequence[ConfigGroup]) -> list[str]:
    return list(dict.fromkeys(key for group in groups for key in group.swept))


def _list_metrics(groups: Sequence[ConfigGroup]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group.metrics))


def _format_summary(summary: Summary | None) -> str:
    return "-" if summary is None else format_spread(summary.mean, summary.std)


def _format_config(group: ConfigGroup, keys: Sequence[str]) -> list[str]:
    return [shorten_number(group.swept.get(key, "-")) for key in keys]


def _format_difference(difference: Comparison, detect: float | None) -> list[str]:
    mean = "-"
    if difference.mean is not None:
        # four decimals like the interval next to it, unless none of them would be left
        mean = f"{difference.mean:+.4f}" if difference.mean else "0.0000"
        if 0 < abs(difference.mean) < 1e-4 or abs(difference.mean) >= 1e5:
            mean = f"{difference.mean:+.2g}"
    p_value = _format_optional(difference.p_adjusted, "{:.4f}")
    if difference.p_adjusted is not None and difference.p_adjusted < 1e-4:
        p_value = "<0.0001"
    needed = difference.pairs_needed
    if detect is not None:
        needed = difference.pairs_to_detect
    cell = _format_needed(needed)
    if not difference.std or (detect is None and not difference.mean):
        cell = "-"
    return [
        mean,
        format_interval(difference.low, difference.high),
        p_value,
        str(difference.pairs),
        cell,
    ]


def _format_needed(pairs: int | None) -> str:
    if pairs is None:
        return f">{MOST_PAIRS:,}"
    return f"{pairs:,}"


def _format_optional(value: float | None, template: str = "") -> str:
    if value is None:
        return "-"
    if template:
        return template.format(value)
    return format_metric(value)
