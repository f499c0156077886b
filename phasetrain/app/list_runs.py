"""Lists runs by reading their folders: state, progress, best metric and remaining time of each.

It imports no torch, so a thousand folders are listed in seconds.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phasetrain.errors import ConfigError
from phasetrain.runs.history import History
from phasetrain.runs.records import (
    ENVIRONMENT,
    METRICS,
    PLAN,
    STATUS,
    StatusRecord,
    parse_count,
    parse_metrics,
)
from phasetrain.runs.view import LEDGER, OVERRIDES, RunView
from phasetrain.runtime.format import format_duration, format_percent, format_timestamp, shorten
from phasetrain.runtime.terminal import plain_table

DEPTH = 6
"""Levels of folders that are searched for runs."""

PLAN_BYTES = 4096
METRICS_BYTES = 4 << 20
RECENT_BYTES = 1 << 14
"""Bytes read from the start of plan.json and from the end of metrics.jsonl; of the latter all lines
in the last part are parsed, before it only lines of phases."""

RUN_FILES = frozenset({PLAN, METRICS, ENVIRONMENT, LEDGER, OVERRIDES})
"""A run folder without a status has at least two of these files."""

COLUMNS = ("run", "state", "attempt", "updates", "", "best", "left", "last seen", "last error")

_PLANNED = re.compile(rb'^ ?"updates": (\d+)', re.MULTILINE)
_PHASE = re.compile(rb'^\{"kind": "phase".*$', re.MULTILINE)


@dataclass(frozen=True)
class RunSummary:
    """State and progress of a run, as its folder shows them.

    Attributes:
        folder: path of the run folder.
        state: `running`, `finished`, `paused`, `interrupted`, `preempted` or `failed` as in
            status.json; `killed` if it should be running and gives no sign of life; `planned` if
            nothing has run yet; `incomplete` if there is data and no status; `unreadable` or
            `unknown` if status.json is damaged or of another version; `no run` if the folder holds
            none.
        attempt: number of the newest attempt; 0 if unknown.
        updates: updates done.
        planned: updates of the whole run; 0 if unknown.
        best: best value of `metric`; None if it was never measured.
        metric: CHECKPOINT.best.monitor without its sign, or the first metric of a test.
        direction: which values of the metric are better: `larger` or `smaller`; empty if nothing
            was measured.
        best_updates: updates at which the best value was measured.
        last: latest value of `metric`.
        seconds: duration of all attempts together.
        left_seconds: estimated seconds until a running run ends; None if unknown.
        seen: time of the last sign of life, in seconds since 1970; 0.0 if there was none.
        error: why it ended, unless it finished.
    """

    folder: str
    state: str
    attempt: int = 0
    updates: int = 0
    planned: int = 0
    best: float | None = None
    metric: str = ""
    direction: str = ""
    best_updates: int = 0
    last: float | None = None
    seconds: float = 0.0
    left_seconds: float | None = None
    seen: float = 0.0
    error: str = ""

    def format_cells(self, root: str, now: float) -> tuple[str, ...]:
        """Return a cell per column of `COLUMNS`; the folder is relative to `root`."""
        progress = str(self.updates or "-")
        share = ""
        if self.planned:
            progress = f"{self.updates}/{self.planned}"
            share = format_percent(min(self.updates, self.planned), self.planned)
        best = left = seen = "-"
        if self.best is not None:
            best = f"{self.metric} {self.best:.4g} at {self.best_updates}"
        if self.left_seconds is not None:
            left = format_duration(self.left_seconds)
        if self.seen:
            seen = f"{format_duration(max(0.0, now - self.seen))} ago"
        cells = (
            os.path.relpath(self.folder, root),
            self.state,
            str(self.attempt or "-"),
            progress,
            share,
            best,
            left,
            seen,
            shorten(self.error.strip().partition("\n")[0], 80),
        )
        return tuple(_make_printable(cell) for cell in cells)


def list_runs(root: str) -> list[RunSummary]:
    """Return a summary of each run below a folder, and of each child folder without a run.

    Raises:
        ConfigError: there is no such folder (code `runs.no_folder`).
    """
    top = Path(root)
    if not top.is_dir():
        raise ConfigError(
            f"{root!r}: there is no such folder; name one that contains runs", code="runs.no_folder"
        )
    if is_run_folder(top):
        return [summarize_run(top)]
    summaries = []
    for child in _list_folders(top):
        runs = [summarize_run(path) for path in _find_runs(child, DEPTH)]
        summaries += runs or [RunSummary(str(child), "no run")]
    return summaries


def format_table(summaries: Sequence[RunSummary], root: str) -> str:
    """Return summaries as a text table."""
    if not summaries:
        return f"{root} contains no runs"
    now = time.time()
    states = Counter(summary.state for summary in summaries)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    noun = "folder" if len(summaries) == 1 else "folders"
    title = f"{len(summaries)} {noun} in {root}: {counts}"
    return plain_table(title, COLUMNS, [summary.format_cells(root, now) for summary in summaries])


def summarize_run(folder: Path, monitor: str = "") -> RunSummary:
    """Return the state and progress of the run in a folder.

    Args:
        folder: path of the run folder.
        monitor: metric to look at, see `History.best`; CHECKPOINT.best.monitor of the run by
            default.
    """
    try:
        return _summarize_run(folder, monitor)
    except Exception as error:  # noqa: BLE001 - a damaged folder must not hide the others
        return RunSummary(str(folder), "unreadable", error=f"{type(error).__name__}: {error}")


def _summarize_run(folder: Path, monitor: str) -> RunSummary:
    run = RunView(folder)
    status = run.status
    if run.problems:
        return RunSummary(str(folder), "unreadable", error=run.problems[0])
    now = time.time()
    history = History.from_lines(parse_metrics(_read_metrics_tail(folder / METRICS)))
    monitor = monitor or run.monitor or ""
    # A run compared by a metric that it has not measured still has a best value of another one.
    best = None
    if monitor.removeprefix("-") in history.last:
        best = history.best_monitored(monitor)
    best = best or history.best()
    # A search instead of a parse: the plan lists every phase, and the number is near its beginning.
    planned = _PLANNED.search(_read_head(folder / PLAN, PLAN_BYTES))
    summary = RunSummary(
        str(folder),
        _observe_state(status, folder, now),
        status.attempt,
        status.updates,
        planned=parse_count(planned and int(planned[1])),
        seconds=sum(status.run_seconds.values()),
        seen=status.heartbeat.at,
    )
    if best is not None:
        summary = replace(
            summary,
            best=float(best.value),
            metric=best.metric,
            direction=str(best.direction),
            best_updates=best.updates,
            last=history.last.get(best.metric),
        )
    # A killed run cannot write why it ended: the reason in its status is an older one, or none.
    if summary.state == "killed":
        error = "no sign of life; start it again"
        if summary.seen:
            error = f"no sign of life since {format_timestamp(summary.seen)}; start it again"
        return replace(summary, error=error)
    if summary.state == "running":
        return replace(summary, left_seconds=_estimate_seconds_left(history, summary, now))
    if summary.state in ("finished", "planned"):
        return summary
    return replace(summary, error=status.reason or status.cause)


def _find_runs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run folders at and below a folder."""
    if is_run_folder(folder):
        yield folder
    elif depth:
        for child in _list_folders(folder):
            yield from _find_runs(child, depth - 1)


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder contains a run, or a part of one."""
    try:
        names = {entry.name for entry in os.scandir(folder)}
    except OSError:
        return False
    own = names & RUN_FILES
    # Two files, because one with such a name alone may belong to another program.
    if STATUS in names or len(own) > 1 or ("checkpoints" in names and bool(own)):
        return True
    # `phasetrain plan` leaves nothing but the plan.
    return PLAN in names and _PLANNED.search(_read_head(folder / PLAN, PLAN_BYTES)) is not None


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, except hidden ones, sorted by name."""
    try:
        return sorted(
            Path(entry.path)
            for entry in os.scandir(folder)
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError:
        return []


def _observe_state(status: StatusRecord, folder: Path, now: float) -> str:
    if state := status.observe_state(now):
        return shorten(_make_printable(state), 20)
    # The file is there and names no state: another version wrote it.
    if (folder / STATUS).exists():
        return "unknown"
    if (folder / "checkpoints").is_dir() or (folder / METRICS).exists():
        return "incomplete"
    return "planned"


def _estimate_seconds_left(history: History, summary: RunSummary, now: float) -> float | None:
    """Return the remaining seconds at the speed of the latest rows; None if it is unknown."""
    rows = [row for row in history[-50:] if isinstance(row.get("time/at"), int | float)]
    while rows and rows[0]["updates"] > rows[-1]["updates"]:  # lines of an attempt before a resume
        rows.pop(0)
    if len(rows) < 2 or not summary.planned:
        return None
    updates = rows[-1]["updates"] - rows[0]["updates"]
    seconds = rows[-1]["time/at"] - rows[0]["time/at"]
    if updates <= 0 or seconds <= 0:
        return None
    # The last row may be older than the last update: the time since then counts as progress.
    ahead = (summary.planned - rows[-1]["updates"]) * seconds / updates
    return float(max(0.0, ahead - max(0.0, now - rows[-1]["time/at"])))


def _read_head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _read_metrics_tail(path: Path) -> bytes:
    """Return the phase lines at the end of metrics.jsonl and all of its latest lines.

    Step lines are needed for the speed only, and parsing all of them would take most of the time of
    a list of runs.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # This may cut a line: it begins unlike a phase, or is skipped as damaged.
            file.seek(max(0, size - METRICS_BYTES))
            content = file.read()
    except OSError:
        return b""
    # Cut at the end of a line: the first lines of this part are parsed in full.
    recent = 0
    if len(content) > RECENT_BYTES:
        recent = content.find(b"\n", len(content) - RECENT_BYTES) + 1
    phases = [match[0] for match in _PHASE.finditer(content, 0, recent)]
    return b"\n".join([*phases, content[recent:]])


def _make_printable(text: str) -> str:
    # Errors and folder names may hold escape sequences, which would change the terminal.
    return "".join(char if char.isprintable() else " " for char in text)


def describe_progress(summary: RunSummary) -> str:
    """Return state and progress of a run in one line."""
    _, state, _, updates, share, best, left, seen, _ = summary.format_cells(
        summary.folder, time.time()
    )
    optional = {f"best {best}": best, f"{left} left": left, f"seen {seen}": seen}
    parts = [text for text, cell in optional.items() if cell != "-"]
    return "  ".join([state, f"update {updates} {share}".strip(), *parts])
