"""How a run stands, in a few figures at the top of its report."""

from collections.abc import Sequence

from phasetrain.runs.report.html import element, escaped, table
from phasetrain.runs.report.reading import RunReport
from phasetrain.runtime.clock import goodput
from phasetrain.runtime.format import format_duration, format_percent

STATES = ("finished", "running", "preempted", "failed", "killed")
"""States with a colour in report.css."""


def tiles(run: RunReport, now: float) -> str:
    """Return state, progress, time and place of a run."""
    state = run.status.observe_state(now)
    reason = run.status.reason
    cards = [
        _tile("state", badge(state), "" if reason == "completed" else reason),
        _tile("updates", progress(run), planned(run)),
        _tile("time", _format_total(run), _attempts(run)),
    ]
    spent = run.status.run_seconds
    if spent:
        cards.append(
            _tile("goodput", format_percent(goodput(spent)), "of the time in steps of the plan")
        )
    rate = run.steps.get("samples/s")
    if rate is not None and len(rate.y):
        middle = sorted(rate.y.tolist())[len(rate.y) // 2]
        cards.append(_tile("samples/s", f"{middle:,.0f}", "median"))
    device = run.environment.device
    if device:
        cards.append(_tile("device", escaped(device), _processes(run)))
    digest = run.status.digest
    if digest:
        cards.append(
            _tile("weights", element("code", escaped(digest[:12])), "SHA-256, see status.json")
        )
    return element("div", "".join(cards), cls="tiles") + element(
        "p", element("code", escaped(run.path)), cls="note"
    )


def runs_table(runs: Sequence[RunReport], names: Sequence[str], now: float) -> str:
    """Return the same of several runs."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        spent = run.status.run_seconds
        good = format_percent(goodput(spent)) if spent else "-"
        device = escaped(run.environment.device or "-")
        where = element("code", escaped(run.path))
        state = badge(run.status.observe_state(now))
        rows.append((escaped(name), state, progress(run), _format_total(run), good, device, where))
    return table(
        ("run", "state", "updates", "time", "goodput", "device", "folder"), rows, cls="wide"
    )


def badge(state: str) -> str:
    """Return a state with its colour."""
    text = "no sign of life" if state == "killed" else state or "unknown"
    return element("span", escaped(text), cls=f"badge {state if state in STATES else 'unknown'}")


def progress(run: RunReport) -> str:
    """Return the updates done."""
    return f"{run.status.updates:,}" if "updates" in run.status.content else "-"


def planned(run: RunReport) -> str:
    """Return the planned updates; empty if unknown."""
    return f"of {run.plan.updates:,}" if run.plan.updates else ""


def _format_total(run: RunReport) -> str:
    """Return the duration of all attempts."""
    seconds = sum(run.status.run_seconds.values())
    return format_duration(seconds) if seconds else "-"


def _processes(run: RunReport) -> str:
    count = run.environment.processes
    return "1 process" if count == 1 else f"{count} processes"


def _attempts(run: RunReport) -> str:
    count = run.status.attempt
    return f"{count} attempts" if count > 1 else "one attempt"


def _tile(name: str, value: str, note: str = "") -> str:
    parts = element("span", escaped(name), cls="name") + element("b", value)
    return element("div", parts + element("span", escaped(note[:160]), cls="note"), cls="tile")
