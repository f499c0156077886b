"""State, progress and time of runs, at the top of a report."""

from collections.abc import Mapping, Sequence

from phasetrain.addons.report.page.reading import RunReport
from phasetrain.config.nested import leaves
from phasetrain.config.objects import display_name
from phasetrain.runs.records import PlanRecord, parse_count
from phasetrain.runtime.clock import goodput
from phasetrain.runtime.format import format_count, format_duration, format_metric, format_percent
from phasetrain.runtime.html import element, escape_text, table

STATES = ("finished", "running", "paused", "preempted", "interrupted", "failed", "killed")
"""States with a colour in report.css."""


def tiles_section(run: RunReport, now: float) -> str:
    """Return tiles with state, progress, time and device of a run."""
    state = run.status.observe_state(now)
    reason = run.status.reason
    if reason == "completed":
        reason = ""  # the state says so
    planned = f"of {run.plan.updates:,}" if run.plan.updates else ""
    cards = [
        *_headline(run),
        _tile("state", badge(state), reason),
        _tile("updates", format_progress(run), planned),
        _tile("time", _format_total(run), format_count(max(run.status.attempt, 1), "attempt")),
    ]
    spent = run.status.run_seconds
    if spent:
        cards.append(
            _tile("in steps", format_percent(goodput(spent)), "of the time, training or testing")
        )
    unit = "tokens/s" if "tokens/s" in run.steps else "samples/s"
    rate = run.steps.get(unit)
    if rate is not None and len(rate.y):
        # the median, because a validation or a save between two lines gives an outlier
        middle = sorted(rate.y.tolist())[len(rate.y) // 2]
        cards.append(_tile(unit, f"{middle:,.0f}", "median"))
    device = run.environment.device
    if device:
        cards.append(
            _tile(
                "device",
                escape_text(device),
                format_count(max(run.environment.processes, 1), "process"),
            )
        )
    digest = run.status.digest
    if digest:
        cards.append(
            _tile("weights", element("code", escape_text(digest[:12])), "SHA-256, see status.json")
        )
    lines = [*_describe_parts(run.plan), element("code", escape_text(run.path))]
    return element("div", "".join(cards), cls="tiles") + "".join(
        element("p", line, cls="note") for line in lines
    )


def _headline(run: RunReport) -> list[str]:
    """Return a tile with the metric that counts: the monitored one, or the first of a test."""
    chosen = leaves(run.config).get("CHECKPOINT.best.monitor")
    monitor = chosen if isinstance(chosen, str) and chosen != "auto" else None
    best = run.history.best_monitored(monitor) if monitor else None
    best = best or run.history.best()
    if best is None:
        return []
    split, _, name = best.metric.partition("/")
    curve = run.metrics.get(name, {}).get(split)
    last = best.value if curve is None else float(curve.y[-1])
    note = f"best {format_metric(best.value)} at update {best.updates:,}"
    return [_tile(best.metric, format_metric(last), note)]


def _describe_parts(plan: PlanRecord) -> list[str]:
    """Return a line about the model and one about the data, as far as they are known."""
    lines = []
    model = plan.content.get("model")
    if isinstance(model, Mapping):
        total = parse_count(model.get("parameters"))
        trained = parse_count(model.get("trained"))
        text = f"{display_name(str(model.get('name')))}, {total:,} parameters"
        if trained != total:
            text += f", {trained:,} of them trained"
        lines.append(element("b", "model") + " " + escape_text(text))
    data = plan.content.get("data")
    if isinstance(data, Mapping) and data:
        splits = [
            f"{split} {display_name(str(split_record.get('dataset')))} "
            f"({parse_count(split_record.get('samples')):,} samples)"
            for split, split_record in data.items()
            if isinstance(split_record, Mapping)
        ]
        lines.append(element("b", "data") + " " + escape_text(", ".join(splits)))
    return lines


def runs_table(runs: Sequence[RunReport], names: Sequence[str], now: float) -> str:
    """Return a table with state, progress, time and device of several runs."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        spent = run.status.run_seconds
        good = format_percent(goodput(spent)) if spent else "-"
        device = escape_text(run.environment.device or "-")
        path = element("code", escape_text(run.path))
        state = badge(run.status.observe_state(now))
        rows.append(
            (
                escape_text(name),
                state,
                format_progress(run),
                _format_total(run),
                good,
                device,
                path,
            )
        )
    return table(
        ("run", "state", "updates", "time", "in steps", "device", "folder"), rows, cls="wide"
    )


def badge(state: str) -> str:
    """Return a coloured state."""
    text = state or "unknown"
    if state == "killed":
        text = "no sign of life"  # its host may only be cut off, which cannot be seen from here
    # The state is text of a file: only known ones become part of a class.
    color = state if state in STATES else "unknown"
    return element("span", escape_text(text), cls=f"badge {color}")


def format_progress(run: RunReport) -> str:
    """Return the updates done."""
    # The record has 0 where the file has no entry; a young run shows that it is unknown.
    if "updates" not in run.status.content:
        return "-"
    return f"{run.status.updates:,}"


def _format_total(run: RunReport) -> str:
    """Return the duration of all attempts."""
    seconds = sum(run.status.run_seconds.values())
    if seconds:
        return format_duration(seconds)
    return "-"


def _tile(name: str, value: str, note: str = "") -> str:
    parts = element("span", escape_text(name), cls="name") + element("b", value)
    return element("div", parts + element("span", escape_text(note[:160]), cls="note"), cls="tile")
