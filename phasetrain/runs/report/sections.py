"""The tables of a report: metrics, time, config, environment, log."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phasetrain.runs.direction import Direction
from phasetrain.runs.records import StatusRecord, parse_number
from phasetrain.runs.report.charts import metric_names
from phasetrain.runs.report.html import element, escaped, table
from phasetrain.runs.report.reading import Curve, RunReport, flatten
from phasetrain.runs.report.tiles import badge
from phasetrain.runtime.clock import KINDS, goodput
from phasetrain.runtime.format import format_duration, format_percent, format_timestamp

ATTEMPTS = 30
"""Attempts that get a bar of their own; the newest ones."""

LONGEST = 400
"""Signs of a value that a table shows."""

BESIDE = 100
"""The same where several runs stand beside each other."""

OF_A_FOLDER = ("RUN.dir", "RUN.name")
"""Keys that every run has its own way."""


def final_metrics(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return the last value of every metric and its range: a row for each, with several runs a
    column for each."""
    keys = dict.fromkeys(
        (split, metric)
        for metric in metric_names(runs, every=True)
        for run in runs
        for split in run.metrics.get(metric, {})
    )
    ordered = sorted(keys, key=lambda key: key[0] == "train")
    if not ordered:
        return element("p", "No phase was completed, so nothing was measured.", cls="note")
    if len(runs) == 1:
        found = [(split, metric, runs[0].metrics[metric][split]) for split, metric in ordered]
        rows = [
            (escaped(f"{split}/{metric}"), *_summary(curve, runs[0].direction_of(metric)))
            for split, metric, curve in found
        ]
        return _folded(
            table(
                ("metric", "last", "at update", "lowest", "at", "highest", "at"),
                rows,
                cls="figures",
            ),
            rows,
        )
    body = [
        (
            escaped(f"{split}/{metric}"),
            *(_last(run.metrics.get(metric, {}).get(split)) for run in runs),
        )
        for split, metric in ordered
    ]
    note = element(
        "p", "The last value, and in small figures the lowest and the highest one.", cls="note"
    )
    return note + _folded(table(("metric", *names), body, cls="figures"), body)


def times(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return a bar for each attempt of a run, or for each of several runs, divided by what the time
    went into."""
    if len(runs) == 1:
        attempts = runs[0].attempts[-ATTEMPTS:]
        bars = [
            (_attempt_name(one, last=one is attempts[-1]), one.attempt_seconds) for one in attempts
        ]
        if len(runs[0].attempts) > 1:
            bars.append(("the run", runs[0].status.run_seconds))
    else:
        bars = [
            (escaped(name), run.status.run_seconds) for run, name in zip(runs, names, strict=True)
        ]
    bars = [(name, spent) for name, spent in bars if spent]
    if not bars:
        return ""
    longest = max(sum(spent.values()) for _, spent in bars) or 1.0
    keys = "".join(
        element("span", escaped(kind), cls=f"key k{place}") for place, kind in enumerate(KINDS)
    )
    drawn = "".join(
        _bar(
            name,
            spent,
            longest,
            KINDS,
            f"{format_duration(sum(spent.values()))}, {format_percent(goodput(spent))} in steps",
        )
        for name, spent in bars
    )
    return element("div", keys, cls="legend") + element("div", drawn, cls="bars")


def steps_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return a bar for each split of each run, divided by what its steps were busy with (hook
    `breakdown`)."""
    bars: list[tuple[str, dict[str, float], int]] = []
    for run, name in zip(runs, names, strict=True):
        splits = run.breakdown.get("splits")
        for split, found in splits.items() if isinstance(splits, Mapping) else ():
            spent = {
                str(part): parse_number(one["seconds"]) for part, one in found["parts"].items()
            }
            told = escaped(split if len(runs) == 1 else f"{name} · {split}")
            bars.append((told, spent, int(found["steps"])))
    if not bars:
        return ""
    parts = list(dict.fromkeys(part for _, spent, _ in bars for part in spent))
    keys = "".join(
        element("span", escaped(part), cls=f"key k{place}") for place, part in enumerate(parts)
    )
    longest = max(sum(spent.values()) / max(steps, 1) for _, spent, steps in bars) or 1.0
    drawn = []
    for name, spent, steps in bars:
        each = {part: seconds / max(steps, 1) for part, seconds in spent.items()}
        total = f"{1e3 * sum(each.values()):.3g} ms per step, {steps:,} steps"
        drawn.append(_bar(name, each, longest, parts, total))
    return element("div", keys, cls="legend") + element("div", "".join(drawn), cls="bars")


def config_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return in which keys a run differs from the defaults, or several from each other."""
    if len(runs) > 1:
        rows = _different([flatten(run.config) for run in runs], skip=OF_A_FOLDER)
        if not rows:
            return element("p", "The configs are equal.", cls="note")
        return table(("key", *names), rows, cls="wide")
    run = runs[0]
    parts = []
    if run.plan.differs:
        parts.append(element("p", "What differs from the defaults:", cls="note"))
        given = [
            (_code(key), _value(value), escaped(source)) for key, value, source in run.plan.differs
        ]
        parts.append(table(("key", "value", "from"), given))
    elif run.overrides:
        parts.append(element("p", "Given on the command line:", cls="note"))
        parts.append(element("pre", escaped("\n".join(run.overrides))))
    else:
        parts.append(element("p", "Nothing was given on the command line.", cls="note"))
    if run.config:
        rows = [(_code(key), _value(value)) for key, value in flatten(run.config).items()]
        parts.append(_details(f"all {len(rows)} keys", table(("key", "value"), rows)))
    return "".join(parts)


def environment_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return where a run took place, or in what the places of several differ."""
    if len(runs) > 1:
        rows = _different([flatten(run.environment.content) for run in runs])
        if not rows:
            return element("p", "The environments are equal.", cls="note")
        return table(("", *names), rows, cls="wide")
    found = runs[0].environment.content
    first = {key: value for key, value in found.items() if not isinstance(value, Mapping | list)}
    rest = {key: value for key, value in found.items() if key not in first and value}
    if not found:
        return ""
    parts = [
        table(
            ("", ""), [(escaped(key), _value(value)) for key, value in first.items()], cls="plain"
        )
    ]
    for key, value in rest.items():
        rows = [
            (escaped(name), _value(one))
            for name, one in (
                enumerate(value) if isinstance(value, list) else flatten(value).items()
            )
        ]
        parts.append(_details(key, table(("", ""), rows, cls="plain")))
    return "".join(parts)


def log_section(run: RunReport) -> str:
    """Return the end of the log."""
    if not run.log:
        return ""
    return _details(
        f"the last {len(run.log)} lines of log.txt", element("pre", escaped("\n".join(run.log)))
    )


def figure_text(value: float) -> str:
    """Return a number with four significant digits."""
    if not np.isfinite(value):
        return "-"
    if abs(value) >= 1e4 and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _summary(curve: Curve, direction: Direction) -> tuple[str, ...]:
    if not np.isfinite(curve.y).any():
        return ("not finite", f"{curve.x[-1]:,.0f}", "-", "-", "-", "-")
    low = int(np.nanargmin(curve.y))
    high = int(np.nanargmax(curve.y))
    last = figure_text(curve.y[-1]) if np.isfinite(curve.y[-1]) else "not finite"
    cells = [element("b", last), f"{curve.x[-1]:,.0f}"]
    best = low if direction is Direction.SMALLER else high
    for place in (low, high):
        value = figure_text(curve.y[place])
        is_best = place == best and low != high
        cells.append(element("b", value, cls="best", title="best value") if is_best else value)
        cells.append(f"{curve.x[place]:,.0f}")
    return tuple(cells)


def _last(curve: Curve | None) -> str:
    if curve is None:
        return "-"
    if not np.isfinite(curve.y).any():
        return "not finite"
    low = figure_text(np.nanmin(curve.y))
    high = figure_text(np.nanmax(curve.y))
    return element("b", figure_text(curve.y[-1])) + element("small", f" {low} … {high}")


def _attempt_name(attempt: StatusRecord, *, last: bool) -> str:
    # an earlier attempt cannot be running: the lock has passed on
    state = "killed" if attempt.state == "running" and not last else attempt.state
    at = format_timestamp(attempt.heartbeat.at)
    return f"{attempt.attempt} {badge(state)} {element('small', escaped(at))}"


def _bar(
    name: str, spent: Mapping[str, float], longest: float, parts: Sequence[str], total: str
) -> str:
    pieces = "".join(
        element(
            "i",
            "",
            cls=f"k{place}",
            style=f"width:{100 * value / longest:.3f}%",
            title=f"{part} {_duration(value)}",
        )
        for place, part in enumerate(parts)
        if (value := spent.get(part, 0.0)) > 0
    )
    return (
        element("div", name, cls="what")
        + element("div", pieces, cls="bar")
        + element("div", total, cls="total")
    )


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return format_duration(seconds)
    return f"{1e3 * seconds:.3g} ms"


def _different(
    sides: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    keys = dict.fromkeys(key for side in sides for key in side)
    missing = element("span", "absent", cls="note")
    rows = []
    for key in keys:
        values = [side[key] for side in sides if key in side]
        equal = len(values) == len(sides) and all(value == values[0] for value in values)
        empty = all(isinstance(value, Mapping) for value in values)  # its keys are in the others
        if not equal and not empty and key not in skip:
            cells = (_value(side[key], BESIDE) if key in side else missing for side in sides)
            rows.append((_code(key), *cells))
    return rows


def _code(text: Any) -> str:
    return element("code", escaped(text))


def _value(value: Any, longest: int = LONGEST) -> str:
    if value is None:
        text = "null"
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    return _code(text if len(text) <= longest else f"{text[:longest]} … ({len(text):,} signs)")


def _folded(content: str, rows: Sequence[object], most: int = 24) -> str:
    """Return a table of many rows behind a heading."""
    if len(rows) <= most:
        return content
    return _details(f"all {len(rows)} metrics", content)


def _details(name: str, content: str) -> str:
    return element("details", element("summary", escaped(name)) + content)
