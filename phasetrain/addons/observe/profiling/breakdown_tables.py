"""Tables and JSON of the step times that the hook `breakdown` measures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phasetrain.addons.observe.profiling.timing import (
    EVENTS_OUTSIDE_PHASES,
    PARTS,
    StepTimes,
    StepTotals,
)

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, header and rows."""

HookCalls = tuple[str, str, int, float]
"""Label and event of a hook, number of calls, seconds."""

MAX_HOOK_ROWS = 15
"""Maximum number of hooks in the table; the file has all of them."""


def flop_rates(totals: StepTotals, peak_flops: float | None) -> dict[str, float]:
    """Return FLOP/s and model FLOPs utilization (MFU), if they are known."""
    if not totals.flops or not totals.wall:
        return {}
    rate = totals.flops / totals.wall
    if peak_flops is None:
        return {"flops_per_second": rate}
    return {"flops_per_second": rate, "mfu": rate / peak_flops}


def summarize_steps(totals: StepTotals, peak_flops: float | None) -> dict[str, Any]:
    """Return the figures of a split as JSON data."""
    summary = {
        "steps": totals.steps,
        "seconds": totals.wall,
        "parts": _summarize_parts(totals.seconds, totals.steps),
    }
    if totals.device_seconds:
        summary["device_parts"] = _summarize_parts(totals.device_seconds, totals.steps)
    return summary | flop_rates(totals, peak_flops)


def slowest_hooks(times: StepTimes, *, enabled: bool) -> list[HookCalls]:
    """Return the calls of each hook by event, the slowest first; none unless enabled."""
    if not enabled:
        return []
    rows = [(*key, row.calls, row.seconds) for key, row in times.calls.items() if row.calls]
    return sorted(rows, key=lambda row: -row[-1])


def make_tables(times: StepTimes, hooks: Sequence[HookCalls]) -> list[Table]:
    """Return the table of steps, and the table of the slowest hooks if there are any."""
    totals = times.totals
    has_device = times.device is not None
    rows = [
        row
        for split, split_totals in totals.items()
        for row in _part_rows(split, split_totals, device=has_device)
    ]
    head: tuple[str, ...] = ("split", "part", "seconds", "share", "us per step")
    if has_device:
        head += ("on the device", "share", "us per step")
    tables: list[Table] = [("where the step time went", head, rows)]
    steps = sum(split_totals.steps for split_totals in totals.values())
    wall = sum(split_totals.wall for split_totals in totals.values())
    hook_rows: list[tuple[str, ...]] = []
    for label, event, calls, seconds in hooks:
        if event in EVENTS_OUTSIDE_PHASES:  # not a part of any step, so it has no share of one
            cells = (f"{seconds:.3f}", "", "")
        else:
            cells = _time_cells(seconds, wall, steps)
        hook_rows.append((label, event, str(calls), *cells))
    if hook_rows:
        title = "slowest hooks"
        if len(hook_rows) > MAX_HOOK_ROWS:
            title += f", {MAX_HOOK_ROWS} of {len(hook_rows)} events"
        hook_head = ("hook", "event", "calls", "seconds", "share", "us per step")
        tables.append((title, hook_head, hook_rows[:MAX_HOOK_ROWS]))
    return tables


def _part_rows(split: str, totals: StepTotals, *, device: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a split: one per part that took time, and one for their sum."""
    on_device = totals.device_seconds
    device_total = sum(on_device.values())
    for part in PARTS:
        host_seconds = totals.seconds[part]
        device_seconds = on_device.get(part, 0.0)
        if host_seconds or device_seconds:
            cells = _time_cells(device_seconds, device_total, totals.steps) if device else ()
            yield (split, part, *_time_cells(host_seconds, totals.wall, totals.steps), *cells)
    cells = _time_cells(device_total, device_total, totals.steps) if device else ()
    yield (split, "all", *_time_cells(totals.wall, totals.wall, totals.steps), *cells)


def _summarize_parts(seconds: Mapping[str, float], steps: int) -> dict[str, dict[str, float]]:
    total = sum(seconds.values())
    return {
        part: {
            "seconds": part_seconds,
            "share": part_seconds / total if total else 0.0,
            "us_per_step": 1e6 * part_seconds / steps if steps else 0.0,
        }
        for part, part_seconds in seconds.items()
    }


def _time_cells(seconds: float, total: float, steps: int) -> tuple[str, str, str]:
    """Return seconds, share of the total, and microseconds per step as text."""
    share = f"{100 * seconds / total:.1f} %" if total else ""
    per_step = f"{1e6 * seconds / steps:.1f}" if steps else ""
    return f"{seconds:.3f}", share, per_step


def round_parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of all parts, rounded to microseconds."""
    return {part: round(value, 6) for part, value in seconds.items()}
