"""The tables of a report: metrics, time, config, environment, log."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from phasetrain.addons.report.page.charts import metric_names
from phasetrain.addons.report.page.reading import Curve, RunReport
from phasetrain.addons.report.page.tiles import badge
from phasetrain.config.nested import leaves
from phasetrain.config.schema import default_schema
from phasetrain.runs.history import Best
from phasetrain.runs.records import StatusRecord, parse_mapping, parse_number
from phasetrain.runtime.clock import KINDS, goodput
from phasetrain.runtime.format import (
    format_duration,
    format_metric,
    format_percent,
    format_timestamp,
)
from phasetrain.runtime.html import element, escape_text, table

MAX_ATTEMPTS = 30
"""Maximum number of attempts that are shown, the newest ones."""

MAX_VALUE_LENGTH = 400
"""Characters of a value in a table."""

MAX_COMPARED_LENGTH = 100
"""Characters of a value in a table of several runs."""

NO_BEST = "no best value: the meter does not say which values are better, nor does the name"

Bar = tuple[str, Mapping[str, float], str]
"""Name as HTML, seconds by part, and a text about their sum."""


def metrics_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return a table with the last and the best value of every metric; with several runs, a column
    per run."""
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
        run = runs[0]
        rows = []
        for split, metric in ordered:
            name = f"{split}/{metric}"
            best = run.history.best(name)
            rows.append((escape_text(name), *_summarize_curve(run.metrics[metric][split], best)))
        return _fold_long_table(
            table(
                ("metric", "last", "at update", "best", "at update"),
                rows,
                cls="figures",
            ),
            rows,
        )
    body = [
        (
            escape_text(f"{split}/{metric}"),
            *(_format_last(run, split, metric) for run in runs),
        )
        for split, metric in ordered
    ]
    note = element("p", "The last value, and in small figures the best one.", cls="note")
    return note + _fold_long_table(table(("metric", *names), body, cls="figures"), body)


def attempts_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return a bar per attempt of a run, or per run of several, divided by kind of work."""
    if len(runs) == 1:
        attempts = runs[0].attempts[-MAX_ATTEMPTS:]
        rows = [
            (_attempt_name(attempt, last=attempt is attempts[-1]), attempt.attempt_seconds)
            for attempt in attempts
        ]
        if len(runs[0].attempts) > 1:
            rows.append(("the run", runs[0].status.run_seconds))
    else:
        rows = [
            (escape_text(name), run.status.run_seconds)
            for run, name in zip(runs, names, strict=True)
        ]
    bars: list[Bar] = []
    for name, spent in rows:
        if spent:
            share = format_percent(goodput(spent))
            bars.append((name, spent, f"{format_duration(sum(spent.values()))}, {share} in steps"))
    return _draw_bars(bars, KINDS) + _describe_start(runs)


def _describe_start(runs: Sequence[RunReport]) -> str:
    """Return a line with the parts of the start of the last attempt; empty for several runs."""
    times = parse_mapping(runs[0].status.content.get("time"))
    seconds = parse_mapping(times.get("start")) if len(runs) == 1 else {}
    if not seconds:
        return ""
    parts = [f"{name} {_format_seconds(parse_number(spent))}" for name, spent in seconds.items()]
    return element("p", escape_text(f"start of the last attempt: {', '.join(parts)}"), cls="note")


def steps_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return a bar per split of each run, divided by part of the step (hook `breakdown`)."""
    bars: list[Bar] = []
    for run, name in zip(runs, names, strict=True):
        splits = run.breakdown.get("splits")
        if not isinstance(splits, Mapping):
            continue
        for split, timing in splits.items():
            steps = int(timing["steps"])
            each = {
                str(part): parse_number(part_timing["seconds"]) / max(steps, 1)
                for part, part_timing in timing["parts"].items()
            }
            total = f"{1e3 * sum(each.values()):.3g} ms per step, {steps:,} steps"
            label = split
            if len(runs) > 1:
                label = f"{name} · {split}"
            bars.append((escape_text(label), each, total))
    return _draw_bars(bars, list(dict.fromkeys(part for _, each, _ in bars for part in each)))


def config_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return the keys in which a run differs from the defaults, or several runs from each other."""
    if len(runs) > 1:
        schema = default_schema()
        configs = [
            {
                key: value
                for key, value in leaves(run.config).items()
                if not schema.is_of_one_run(key)
            }
            for run in runs
        ]
        return _compare_table(configs, names, "The configs are equal.")
    run = runs[0]
    parts = []
    if run.plan.differs:
        parts.append(element("p", "Settings that are not the default:", cls="note"))
        changed = [
            (_make_code(key), _format_value(value), escape_text(source))
            for key, value, source in run.plan.differs
        ]
        parts.append(table(("key", "value", "from"), changed))
    elif run.overrides:
        parts.append(element("p", "Given on the command line:", cls="note"))
        parts.append(element("pre", escape_text("\n".join(run.overrides))))
    else:
        parts.append(element("p", "Nothing was given on the command line.", cls="note"))
    if run.config:
        rows = [
            (_make_code(key), _format_value(value)) for key, value in leaves(run.config).items()
        ]
        parts.append(_fold(f"all {len(rows)} keys", table(("key", "value"), rows)))
    return "".join(parts)


def deviations_section(run: RunReport) -> str:
    """Return why a repetition of the run may have other weights; empty for an exact run."""
    lines = run.environment.deviations
    if not lines:
        return ""
    items = "".join(element("li", escape_text(line)) for line in lines)
    note = "A repetition may have other weights: this run is not the result of its command alone."
    return element("p", escape_text(note), cls="note") + element("ul", items)


def environment_section(runs: Sequence[RunReport], names: Sequence[str]) -> str:
    """Return the environment of a run, or the differences between several."""
    if len(runs) > 1:
        environments = [leaves(run.environment.content) for run in runs]
        return _compare_table(environments, names, "The environments are equal.")
    environment = runs[0].environment.content
    first = {
        key: value for key, value in environment.items() if not isinstance(value, Mapping | list)
    }
    rest = {key: value for key, value in environment.items() if key not in first and value}
    if not environment:
        return ""
    parts = [
        table(
            ("", ""),
            [(escape_text(key), _format_value(value)) for key, value in first.items()],
            cls="plain",
        )
    ]
    for key, value in rest.items():
        entries: Iterable[tuple[Any, Any]] = enumerate(value)
        if isinstance(value, Mapping):
            entries = leaves(value).items()
        rows = [(escape_text(name), _format_value(entry)) for name, entry in entries]
        parts.append(_fold(key, table(("", ""), rows, cls="plain")))
    return "".join(parts)


def log_section(run: RunReport) -> str:
    """Return the last lines of the log."""
    if not run.log:
        return ""
    return _fold(
        f"the last {len(run.log)} lines of log.txt", element("pre", escape_text("\n".join(run.log)))
    )


def _summarize_curve(curve: Curve, best: Best | None) -> tuple[str, ...]:
    last = element("b", _format_finite(curve.y[-1]))
    at = f"{curve.x[-1]:,.0f}"
    if best is None:
        return (last, at, element("span", "-", title=NO_BEST), "-")
    return (last, at, element("b", format_metric(best.value), cls="best"), f"{best.updates:,}")


def _format_last(run: RunReport, split: str, metric: str) -> str:
    curve = run.metrics.get(metric, {}).get(split)
    if curve is None:
        return "-"
    name = f"{split}/{metric}"
    best = run.history.best(name)
    last = element("b", _format_finite(curve.y[-1]))
    if best is None:
        return last
    return last + element("small", f" {format_metric(best.value)}")


def _format_finite(value: float) -> str:
    if np.isfinite(value):
        return format_metric(value)
    return "not finite"


def _attempt_name(attempt: StatusRecord, *, last: bool) -> str:
    # an earlier attempt cannot be running: the lock has passed on
    state = attempt.state
    if state == "running" and not last:
        state = "killed"
    at = format_timestamp(attempt.heartbeat.at)
    return f"{attempt.attempt} {badge(state)} {element('small', escape_text(at))}"


def _draw_bars(bars: Sequence[Bar], parts: Sequence[str]) -> str:
    """Return bars of a common scale with a legend of their parts; empty without bars."""
    if not bars:
        return ""
    keys = "".join(
        element("span", escape_text(part), cls=f"key k{index}") for index, part in enumerate(parts)
    )
    longest = max(sum(spent.values()) for _, spent, _ in bars) or 1.0
    drawn = "".join(_draw_bar(bar, parts, longest) for bar in bars)
    return element("div", keys, cls="legend") + element("div", drawn, cls="bars")


def _draw_bar(bar: Bar, parts: Sequence[str], longest: float) -> str:
    name, spent, total = bar
    pieces = "".join(
        element(
            "i",
            "",
            cls=f"k{index}",
            style=f"width:{100 * value / longest:.3f}%",
            title=f"{part} {_format_seconds(value)}",
        )
        for index, part in enumerate(parts)
        if (value := spent.get(part, 0.0)) > 0
    )
    return (
        element("div", name, cls="what")
        + element("div", pieces, cls="bar")
        + element("div", total, cls="total")
    )


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return format_duration(seconds)
    return f"{1e3 * seconds:.3g} ms"


def _compare_table(
    sides: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    equal_note: str,
) -> str:
    """Return a table of the keys in which the runs differ, or a note that they are equal."""
    keys = dict.fromkeys(key for side in sides for key in side)
    missing = element("span", "absent", cls="note")
    rows = []
    for key in keys:
        values = [side[key] for side in sides if key in side]
        equal = len(values) == len(sides) and all(value == values[0] for value in values)
        empty = all(isinstance(value, Mapping) for value in values)  # its keys are in the others
        if not equal and not empty:
            # `missing` and not null, which is a value that a config may have
            cells = (
                _format_value(side[key], MAX_COMPARED_LENGTH) if key in side else missing
                for side in sides
            )
            rows.append((_make_code(key), *cells))
    if not rows:
        return element("p", equal_note, cls="note")
    return table(("key", *names), rows, cls="wide")


def _make_code(text: Any) -> str:
    return element("code", escape_text(text))


def _format_value(value: Any, longest: int = MAX_VALUE_LENGTH) -> str:
    # as in YAML, from which a reader copies it to a command line
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    if len(text) > longest:
        text = f"{text[:longest]} … ({len(text):,} signs)"
    return _make_code(text)


def _fold_long_table(content: str, rows: Sequence[object], most: int = 24) -> str:
    """Return a table, folded if it has many rows."""
    if len(rows) <= most:
        return content
    return _fold(f"all {len(rows)} metrics", content)


def _fold(name: str, content: str) -> str:
    return element("details", element("summary", escape_text(name)) + content)
