"""How a run stands, in a few figures at the top of its report."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from phasetrain.runs.report.html import element, escaped, table
from phasetrain.runs.report.reading import RunRecord, number, seconds_of
from phasetrain.runtime.clock import goodput

SILENT_SECONDS = 120.0
"""A run that is said to be running and has given no sign of life for so long was probably
killed."""

STATES = ("finished", "running", "preempted", "failed", "silent")


def state_of(run: RunRecord, now: float) -> str:
    """Return one of STATES, or empty where it is not known."""
    state = str(run.status.get("state", ""))
    beat = run.status.get("heartbeat")
    at = number(beat.get("at")) if isinstance(beat, Mapping) else 0.0
    if state == "running" and now - at > SILENT_SECONDS:
        return "silent"
    return state


def tiles(run: RunRecord, now: float) -> str:
    """Return state, progress, time and place of a run."""
    state = state_of(run, now)
    reason = run.status.get("reason") or ""
    cards = [
        _tile("state", badge(state), "" if reason == "completed" else str(reason)),
        _tile("updates", progress(run), planned(run)),
        _tile("time", span(total(run)), _attempts(run)),
    ]
    spent = seconds_of(run.status, "run")
    if spent:
        cards.append(
            _tile("goodput", f"{100 * goodput(spent):.0f} %", "of the time in steps of the plan")
        )
    rate = run.steps.get("samples/s")
    if rate is not None and len(rate.y):
        middle = sorted(rate.y.tolist())[len(rate.y) // 2]
        cards.append(_tile("samples/s", f"{middle:,.0f}", "median"))
    device = run.environment.get("device")
    if device:
        cards.append(_tile("device", escaped(device), _processes(run)))
    digest = run.status.get("digest")
    if digest:
        cards.append(
            _tile("weights", element("code", escaped(str(digest)[:12])), "SHA-256, see status.json")
        )
    return element("div", "".join(cards), cls="tiles") + element(
        "p", element("code", escaped(run.path)), cls="note"
    )


def runs_table(runs: Sequence[RunRecord], names: Sequence[str], now: float) -> str:
    """Return the same of several runs."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        spent = seconds_of(run.status, "run")
        good = f"{100 * goodput(spent):.0f} %" if spent else "-"
        device = escaped(run.environment.get("device", "-"))
        where = element("code", escaped(run.path))
        state = badge(state_of(run, now))
        rows.append((escaped(name), state, progress(run), span(total(run)), good, device, where))
    return table(
        ("run", "state", "updates", "time", "goodput", "device", "folder"), rows, cls="wide"
    )


def badge(state: str) -> str:
    """Return a state with its colour."""
    text = "no sign of life" if state == "silent" else state or "unknown"
    return element("span", escaped(text), cls=f"badge {state if state in STATES else 'unknown'}")


def progress(run: RunRecord) -> str:
    """Return the updates that are done."""
    done = run.status.get("updates")
    if isinstance(done, int):
        return f"{done:,}"
    return "-"


def planned(run: RunRecord) -> str:
    """Return of how many."""
    updates = run.plan.get("updates")
    if isinstance(updates, int):
        return f"of {updates:,}"
    return ""


def total(run: RunRecord) -> float:
    """Return the seconds of all attempts."""
    return sum(seconds_of(run.status, "run").values())


def span(seconds: float) -> str:
    """Return a time for people; a dash for none."""
    if not seconds:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s"


def clock_time(value: Any) -> str:
    """Return seconds since the epoch as date and time; empty where it is no number."""
    at = number(value)
    if 0 < at < 1e11:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return ""


def _processes(run: RunRecord) -> str:
    count = run.environment.get("processes", 1)
    if count == 1:
        return "1 process"
    return f"{count} processes"


def _attempts(run: RunRecord) -> str:
    count = run.status.get("attempt")
    if isinstance(count, int) and count > 1:
        return f"{count} attempts"
    return "one attempt"


def _tile(name: str, value: str, note: str = "") -> str:
    parts = element("span", escaped(name), cls="name") + element("b", value)
    return element("div", parts + element("span", escaped(note[:160]), cls="note"), cls="tile")
