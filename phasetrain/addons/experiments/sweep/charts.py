"""The plots of a sweep: its metric by each swept value, and differences between configs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev

import numpy as np

from phasetrain.addons.experiments.sweep.group_tables import INTERVAL, find_baseline
from phasetrain.addons.experiments.sweep.groups import ConfigGroup, sort_key
from phasetrain.addons.experiments.sweep.override_text import is_repeated
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.addons.experiments.sweep.sweep_run import label_values, name_configs, name_values
from phasetrain.addons.report.page.charts import (
    Axis,
    Chart,
    Line,
    make_slug,
    metric_names,
    needs_log_axis,
    thin_curve,
)
from phasetrain.addons.report.page.reading import Array, Curve, RunReport
from phasetrain.addons.report.page.svg import abbreviate, place_decades, place_ticks
from phasetrain.runs.records import parse_number

COLORED = 8
"""Maximum number of values of a key that may colour the points of a plot by another key."""

SPREAD = 10.0
"""Positive values of a key that span this factor or more get a logarithmic axis."""

GRAY = 7
"""Number of the colour of single runs behind the means of configs."""

SHIFT = 0.015
"""Distance of the dots of single runs from the mean, as a share of the axis: the bar of the mean
would hide them."""

MOST_SHIFT_STEP = 0.012
"""Maximum distance of the bars of two colours at the same value, as a share of the axis."""

LABEL_SIGNS = 84
"""Characters that fit below a plot; longer labels of configs are replaced by their ranks."""


@dataclass(frozen=True)
class _Point:
    """A run, or the mean of the runs of a config.

    Attributes:
        swept: swept overrides, key -> value as text.
        value: of the metric.
        low, high: bounds of its interval; NaN for none.
        is_partial: whether the run has not been trained to its end.
    """

    swept: Mapping[str, str]
    value: float
    low: float = math.nan
    high: float = math.nan
    is_partial: bool = False


def make_charts(results: Results) -> list[Chart]:
    """Return a plot of the metric for each key that has more than one value, and of the differences
    between configs that folds or seeds repeat."""
    runs = [
        _Point(run.swept, run.best, is_partial=run.state != "finished")
        for run in results.runs
        if run.best is not None and run.metric == results.metric
    ]
    if not results.groups:
        return _make_key_charts(results.metric, results.keys, runs, "the best value of each run")
    means = [_make_mean_point(group) for group in results.groups if group.mean is not None]
    keys = [key for key in results.keys if not is_repeated(key)]
    note = f"mean with its {INTERVAL}"
    return [
        *_make_key_charts(results.metric, keys, means, note, runs),
        *_make_difference_charts(results.groups, results.metric),
    ]


def make_mean_curves(configs: Sequence[tuple[str, Sequence[RunReport]]]) -> list[Chart]:
    """Return a plot per metric with the mean curve of each config and a band of one standard
    deviation, at the updates that all of its runs have measured.

    Args:
        configs: name and runs of each config.
    """
    runs = [run for _, reports in configs for run in reports]
    charts = []
    for metric in metric_names(runs):
        splits = list(dict.fromkeys(split for run in runs for split in run.metrics.get(metric, {})))
        lines = [
            line
            for number, (name, reports) in enumerate(configs)
            for split_index, split in enumerate(splits)
            if (
                line := _make_mean_line(
                    f"{name} · {split}", reports, metric, split, number, split_index
                )
            )
        ]
        if lines:
            note = "mean over folds and seeds, with a band of one standard deviation"
            title = metric.replace("_", " ")
            charts.append(Chart(make_slug(metric), title, note, lines, needs_log_axis(lines)))
    return charts


def _make_mean_point(group: ConfigGroup) -> _Point:
    low, high = _read_bounds(group.low, group.high)
    return _Point(group.swept, group.mean or 0.0, low, high)


def _read_bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """Return the bounds of an interval; NaN for none."""
    if low is None or high is None:
        return math.nan, math.nan
    return low, high


def _make_key_charts(
    metric: str,
    keys: Sequence[str],
    points: Sequence[_Point],
    note: str,
    background: Sequence[_Point] = (),
) -> list[Chart]:
    charts = []
    for key in keys:
        scale = _Scale.fit([point.swept[key] for point in points if key in point.swept])
        if scale is None:
            continue
        by = _choose_color_key(keys, key, points)
        explained = note
        if by:
            explained += f", coloured by {by}"
        names = dict(scale.names)
        lines = _make_lines(points, key, scale, by, names)
        if background and not by:
            shifted = scale.shift(SHIFT)
            names |= shifted.names
            lines = [_make_background(background, key, shifted), *lines]
            explained += "; dots are single runs"
        axis = Axis(key, names, scale.marks, scale.room)
        is_log = needs_log_axis(lines)
        charts.append(Chart(f"by-{make_slug(key)}", metric, explained, lines, is_log, axis))
    return charts


def _make_difference_charts(groups: Sequence[ConfigGroup], metric: str) -> list[Chart]:
    """Return the plot of the mean differences from the baseline, if there are any."""
    baseline = find_baseline(groups)
    compared = [
        (rank, group, group.difference)
        for rank, group in enumerate(groups, start=1)
        if group.difference is not None and group.difference.mean is not None
    ]
    if baseline is None or not compared:
        return []
    labels = name_configs([group.swept for group in groups])
    names = {float(rank): labels[rank - 1] for rank, _, _ in compared}
    if sum(map(len, names.values())) > LABEL_SIGNS:
        names = {rank: f"#{rank:.0f}" for rank in names}
    points = [
        (float(rank), difference.mean or 0.0, *_read_bounds(difference.low, difference.high))
        for rank, _, difference in compared
    ]
    ends = [(min(names) - 0.3, 0.0), (max(names) + 0.3, 0.0)]
    zero = Line(name_values(baseline.swept), Curve.from_points(ends), GRAY, dash=1, faint=True)
    line = _make_line("difference", points, 0, joined=False)
    axis = Axis("config", names | {end: "baseline" for end, _ in ends}, sorted(names))
    note = f"mean paired difference from {name_values(baseline.swept)}, with its {INTERVAL}"
    return [Chart("differences", f"difference of {metric}", note, [zero, line], axis=axis)]


def _make_mean_line(
    label: str, runs: Sequence[RunReport], metric: str, split: str, color: int, dash: int
) -> Line | None:
    curves = [
        curve
        for run in runs
        if (curve := run.metrics.get(metric, {}).get(split)) is not None and curve.has_values
    ]
    if not curves:
        return None
    by_update = [dict(zip(curve.x.tolist(), curve.y.tolist(), strict=True)) for curve in curves]
    shared = sorted(set.intersection(*(set(values) for values in by_update)))
    table = np.array([[values[x] for x in shared] for values in by_update], dtype=np.float64)
    if not shared:
        return None
    # thinned together, so that the band keeps the points of its line
    mean = thin_curve(Curve(np.array(shared), table.mean(0)))
    if len(curves) < 2:
        return Line(label, mean, color, dash)
    spread = np.interp(mean.x, shared, [stdev(column) for column in table.T.tolist()])
    return Line(label, mean, color, dash, low=mean.y - spread, high=mean.y + spread)


@dataclass(frozen=True)
class _Scale:
    """Positions of the values of a key on an axis.

    Attributes:
        positions: value as text -> position.
        names: position -> label.
        marks: positions of ticks.
        is_ordered: whether the values are numbers.
    """

    positions: dict[str, float]
    names: dict[float, str]
    marks: Sequence[float]
    is_ordered: bool = True

    @property
    def room(self) -> float:
        """Room at both ends, as a share of the axis; labels of text need more."""
        if self.is_ordered:
            return 0.05
        return 0.5 / (len(self.positions) - 1)

    def shift(self, share: float) -> "_Scale":
        """Return the scale with values that are shifted to the right by a share of the axis."""
        distance = share * (max(self.positions.values()) - min(self.positions.values()))
        positions = {text: position + distance for text, position in self.positions.items()}
        names = {position: text for text, position in positions.items()}
        return _Scale(positions, names, self.marks, self.is_ordered)

    @classmethod
    def fit(cls, values: Sequence[str]) -> "_Scale | None":
        """Return the scale of some values; None if there is only one."""
        texts = list(dict.fromkeys(values))
        if len(texts) < 2:
            return None
        numbers = [_parse_finite(text) for text in texts]
        if any(value is None for value in numbers):
            positions = {text: float(position) for position, text in enumerate(texts)}
            short = label_values(texts)
            shown = {position: short[text] for text, position in positions.items()}
            return cls(positions, shown, list(shown), is_ordered=False)
        finite = [value for value in numbers if value is not None]
        by_logarithm = min(finite) > 0 and max(finite) / min(finite) >= SPREAD
        positions = {
            text: math.log10(v) if by_logarithm else v
            for text, v in zip(texts, finite, strict=True)
        }
        names = {position: text for text, position in positions.items()}
        if len(texts) <= COLORED:
            return cls(positions, names, sorted(names))
        low = min(positions.values())
        high = max(positions.values())
        if by_logarithm:
            marks = [math.log10(value) for value in place_decades(low, high)]
        else:
            marks = list(place_ticks(low, high, 8))
        values_at = {mark: 10**mark if by_logarithm else mark for mark in marks}
        # 10**log10(x) is not exactly x: six digits hide the rounding
        labels = {mark: abbreviate(float(f"{value:.6g}")) for mark, value in values_at.items()}
        return cls(positions, labels | names, marks)


def _make_lines(
    points: Sequence[_Point], key: str, scale: _Scale, by: str, names: dict[float, str]
) -> list[Line]:
    """Return a line per value of the key `by`, and add the labels of shifted points to `names`."""
    has_intervals = any(math.isfinite(point.low) for point in points)
    colors = sorted(
        {point.swept.get(by, "") for point in points if key in point.swept}, key=sort_key
    )
    scales = dict.fromkeys(colors, scale)
    if has_intervals and len(colors) > 1:  # bars at the same value would hide each other
        step = min(MOST_SHIFT_STEP, 2 * SHIFT / (len(colors) - 1))
        middle = (len(colors) - 1) / 2
        scales = {color: scale.shift((index - middle) * step) for index, color in enumerate(colors)}
        for shifted in scales.values():
            names |= shifted.names
    label = "mean" if has_intervals else "runs"
    groups: dict[tuple[str, bool], list[tuple[float, float, float, float]]] = {}
    for point in points:
        if key in point.swept:
            color = point.swept.get(by, "")
            position = scales[color].positions[point.swept[key]]
            drawn = (position, point.value, point.low, point.high)
            groups.setdefault((color, point.is_partial), []).append(drawn)
    # Several runs at one value would be joined by a vertical line, as if they had an order.
    alone = scale.is_ordered and all(
        len({x for x, *_ in drawn_points}) == len(drawn_points) for drawn_points in groups.values()
    )
    lines = []
    for number, color in enumerate(colors):
        name = f"{by}={color}" if by else label
        if finished := groups.get((color, False)):
            lines.append(_make_line(name, sorted(finished), number, joined=alone))
        if partial := groups.get((color, True)):
            line = _make_line(f"{name}, not finished", sorted(partial), number, joined=False)
            lines.append(replace(line, hollow=True))
    return lines


def _make_line(
    label: str, points: Sequence[tuple[float, float, float, float]], color: int, *, joined: bool
) -> Line:
    """Return the line through `(x, value, low, high)`."""
    table = np.array(points, dtype=np.float64).reshape(-1, 4)
    curve = Curve.from_points([(x, value) for x, value, *_ in points])
    low: Array | None = None
    high: Array | None = None
    if np.isfinite(table[:, 2:]).any():
        low = table[:, 2]
        high = table[:, 3]
    return Line(label, curve, color, joined=joined, low=low, high=high)


def _make_background(runs: Sequence[_Point], key: str, scale: _Scale) -> Line:
    """Return the single runs of configs as faint dots."""
    points = [
        (scale.positions[run.swept[key]], run.value)
        for run in runs
        if run.swept.get(key) in scale.positions
    ]
    curve = Curve.from_points(sorted(points))
    return Line("single runs", curve, GRAY, faint=True, joined=False)


def _choose_color_key(keys: Sequence[str], key: str, points: Sequence[_Point]) -> str:
    """Return another key with few values to colour points by; empty if there is none."""
    for other in keys:
        if other != key and 1 < len({point.swept.get(other, "") for point in points}) <= COLORED:
            return other
    return ""


def _parse_finite(text: str) -> float | None:
    value = parse_number(text)
    return value if math.isfinite(value) else None
