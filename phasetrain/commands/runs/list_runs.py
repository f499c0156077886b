"""Runs as their folders tell of them: a row for each, one followed while it runs, two compared
(`tools/runs.py`).

Nothing here needs torch but a comparison: a thousand folders are listed in seconds.
"""

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phasetrain.errors import ConfigError
from phasetrain.runs.history import (
    FILE,
    History,
    monitor_of,
    read_history,
    rows_of,
    smaller_is_better,
)
from phasetrain.runs.lock import LEASE_SECONDS
from phasetrain.runtime.format import format_duration
from phasetrain.runtime.terminal import plain_table

SILENT_SECONDS = 3 * LEASE_SECONDS
"""A running run without a heartbeat for so long has been killed."""

LATEST = 253402300800.0
"""Seconds from 1970 to the year 10000."""

MOST = 1 << 63
"""Counts and durations from there on are damaged."""

DEPTH = 6
"""How many folders deep runs are looked for."""

HEAD_BYTES = 4096
TAIL_BYTES = 4 << 20
"""How much is read of plan.json and, from its end, of metrics.jsonl."""

OWN = frozenset(
    {"plan.json", "metrics.jsonl", "steps.ledger", "overrides.yaml", "environment.json"}
)
"""Files of which a run folder without a status has at least two."""

HEAD = ("run", "state", "attempt", "updates", "", "best", "left", "last seen", "last error")
"""Columns of the list."""

_PLANNED = re.compile(rb'^ ?"updates": (\d+)', re.MULTILINE)
_PHASE = re.compile(rb'^\{"kind": "phase".*$', re.MULTILINE)


@dataclass(frozen=True)
class Summary:
    """What a run folder tells of its run.

    Attributes:
        folder: its path.
        state: `running`, `finished`, `preempted` or `failed` as status.json says; `killed` where a
            running one gives no sign of life; `planned` where nothing has run yet; `unreadable` or
            `unknown` where status.json or what else a folder has is broken or of another version;
            `no run` for a folder that holds none.
        attempt: number of the newest one; 0 where it is not known.
        updates: done.
        planned: updates of the whole run; 0 where it is not known.
        best: the best value of `metric`; None where nothing was measured.
        metric: CHECKPOINT.best.monitor, or the first metric of a test, without a sign.
        best_updates: at which it was measured.
        last: the latest value of `metric`.
        seconds: that all attempts together have taken.
        left_seconds: until a running run will have ended, at its latest pace; None where that is
            not known.
        seen: time of the last sign of life, in seconds since 1970; 0.0 where there was none.
        error: why it ended, where it did not finish.
    """

    folder: str
    state: str
    attempt: int = 0
    updates: int = 0
    planned: int = 0
    best: float | None = None
    metric: str = ""
    best_updates: int = 0
    last: float | None = None
    seconds: float = 0.0
    left_seconds: float | None = None
    seen: float = 0.0
    error: str = ""

    def row(self, root: str, now: float) -> tuple[str, ...]:
        """Return it as a row under `HEAD`; its folder relative to `root`."""
        progress = f"{self.updates}/{self.planned}" if self.planned else str(self.updates or "-")
        share = f"{100 * min(1.0, self.updates / self.planned):.0f} %" if self.planned else ""
        best = "-" if self.best is None else f"{self.metric} {self.best:.4g} at {self.best_updates}"
        left = "-" if self.left_seconds is None else format_duration(self.left_seconds)
        seen = f"{format_duration(max(0.0, now - self.seen))} ago" if self.seen else "-"
        error = self.error.strip().splitlines()[0] if self.error.strip() else ""
        name = os.path.relpath(self.folder, root)
        attempt = str(self.attempt or "-")
        cells = (
            name,
            self.state,
            attempt,
            progress,
            share,
            best,
            left,
            seen,
            _shortened(error, 80),
        )
        return tuple(_in_a_line(cell) for cell in cells)


def listed(root: str) -> list[Summary]:
    """Return a summary of each run below a folder, and of each folder right in it that holds none.

    Raises:
        ConfigError: there is no such folder.
    """
    top = Path(root)
    if not top.is_dir():
        raise ConfigError(f"{root!r}: there is no such folder; name one that holds runs")
    if is_run(top):
        return [summary(top)]
    found = []
    for child in _folders(top):
        runs = [summary(path) for path in _runs(child, DEPTH)]
        found += runs or [Summary(str(child), "no run")]
    return found


def table(summaries: Sequence[Summary], root: str) -> str:
    """Return summaries as a table of text."""
    now = time.time()
    count: dict[str, int] = {}
    for one in summaries:
        count[one.state] = count.get(one.state, 0) + 1
    title = f"{len(summaries)} folders in {root}: {', '.join(f'{number} {state}' for state, number in count.items())}"
    if not summaries:
        return f"{root} holds no runs"
    return plain_table(title, HEAD, [one.row(root, now) for one in summaries])


def as_json(summaries: Sequence[Summary]) -> str:
    """Return summaries as JSON, for scripts; numbers that JSON cannot hold are null."""
    rows = [asdict(one) for one in summaries]
    for row in rows:
        for key in ("best", "last"):
            if row[key] is not None and not math.isfinite(row[key]):
                row[key] = None
    return json.dumps(rows, indent=1)


def summary(folder: Path, monitor: str = "") -> Summary:
    """Return what a run folder tells of its run; whatever is broken in it is left out or said.

    Args:
        folder: its path.
        monitor: which metric to look at, see `History.best`; CHECKPOINT.best.monitor of the run by
            default.
    """
    try:
        return _summary(folder, monitor)
    except Exception as error:  # noqa: BLE001 - a damaged folder must not hide the others
        return Summary(str(folder), "unreadable", error=f"{type(error).__name__}: {error}")


def _summary(folder: Path, monitor: str) -> Summary:
    now = time.time()
    found, broken = _json(folder / "status.json")
    if broken:
        return Summary(str(folder), "unreadable", error=f"status.json: {broken}")
    status = found if isinstance(found, dict) else {}
    history = History(list(rows_of(_tail(folder / FILE))))
    named = monitor or monitor_of(folder) or ""
    best = history.best(named if named.removeprefix("-") in history.last else None)
    planned = _PLANNED.search(_head(folder / "plan.json", HEAD_BYTES))
    heartbeat = status.get("heartbeat")
    beat: dict[str, Any] = heartbeat if isinstance(heartbeat, dict) else {}
    one = Summary(
        str(folder),
        _state(status, folder),
        _count(status.get("attempt")),
        _count(status.get("updates")),
        _count(int(planned[1])) if planned else 0,
        float(best.value) if best else None,
        best.metric if best else "",
        best.updates if best else 0,
        history.last.get(best.metric) if best else None,
        _spent(status),
        seen=_moment(beat.get("at")),
    )
    if one.state == "running" and not _alive(beat, now):
        if one.seen:
            since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one.seen))}"
        else:
            since = ""
        return replace(one, state="killed", error=f"no sign of life{since}; start it again")
    if one.state == "running":
        return replace(one, left_seconds=_left(history, one, now))
    reason = status.get("reason") or status.get("cause") or ""
    if one.state in ("finished", "planned"):
        return one
    return replace(one, error=str(reason))


def compare(one: str, other: str) -> str:
    """Return as text how two runs stand, what they have measured, and what
    `phasetrain.commands.runs.diff.diff` says of them.

    Raises:
        ConfigError: one of the folders holds no run, or none that can be compared.
    """
    from phasetrain.commands.runs.diff import diff  # imports torch

    found = diff(one, other)
    sides = [read_history(path) for path in (one, other)]
    states = [
        summary(Path(path)) if Path(path).is_dir() else Summary(path, "ledger")
        for path in (one, other)
    ]
    rows: list[tuple[str, ...]] = [
        ("state", *(side.state for side in states)),
        ("updates", *(f"{side.updates}/{side.planned or '-'}" for side in states)),
        ("attempts", *(str(side.attempt) for side in states)),
        *_measured(*sides),
    ]
    return "\n\n".join([plain_table("runs", ("", "A", "B"), rows), found.report()])


def _measured(one: History, other: History) -> list[tuple[str, ...]]:
    """Return the last and the best value of each metric of two runs."""
    names = list(dict.fromkeys([*one.last, *other.last]))
    rows: list[tuple[str, ...]] = []
    for name in names:
        rows.append((name, *(_cell(side.last.get(name)) for side in (one, other))))
        bests = [
            side.best(f"-{name}" if smaller_is_better(name) else name) for side in (one, other)
        ]
        rows.append(
            (f"  best of {name}", *(f"{b.value:.6g} at {b.updates}" if b else "-" for b in bests))
        )
    return rows


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run folders at and below a folder."""
    names = _names(folder)
    if _is_run(names):
        yield folder
    elif depth:
        for child in _folders(folder):
            yield from _runs(child, depth - 1)


def is_run(folder: Path) -> bool:
    """Tell whether a folder holds a run, or something of one."""
    return _is_run(_names(folder))


def _is_run(names: set[str]) -> bool:
    return (
        "status.json" in names
        or len(names & OWN) > 1
        or ("checkpoints" in names and bool(names & OWN))
    )


def _names(folder: Path) -> set[str]:
    try:
        return {one.name for one in os.scandir(folder)}
    except OSError:
        return set()


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder but hidden ones, in order of their names."""
    try:
        return sorted(
            Path(one.path)
            for one in os.scandir(folder)
            if one.is_dir() and not one.name.startswith(".")
        )
    except OSError:
        return []


def _state(status: Mapping[str, Any], folder: Path) -> str:
    state = status.get("state")
    if isinstance(state, str) and state:
        return _shortened(_in_a_line(state), 20)
    if status or (folder / "status.json").exists():
        return "unknown"
    if (folder / "checkpoints").is_dir() or (folder / FILE).exists():
        return "incomplete"
    return "planned"


def _alive(beat: Mapping[str, Any], now: float) -> bool:
    """Tell whether the process that writes the heartbeat is still there, as far as can be known
    from here."""
    if now - _moment(beat.get("at")) > SILENT_SECONDS:
        return False
    pid = beat.get("pid")
    if beat.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except (
        ProcessLookupError,
        OverflowError,
    ):  # no process has a number that the system cannot hold
        return False
    except OSError:
        return True
    return True


def _left(history: History, one: Summary, now: float) -> float | None:
    """Return the seconds that are left at the pace of the last rows."""
    rows = [row for row in history[-50:] if isinstance(row.get("time/at"), int | float)]
    while rows and rows[0]["updates"] > rows[-1]["updates"]:
        rows.pop(0)
    if len(rows) < 2 or not one.planned:
        return None
    updates = rows[-1]["updates"] - rows[0]["updates"]
    spent = rows[-1]["time/at"] - rows[0]["time/at"]
    if updates <= 0 or spent <= 0:
        return None
    ahead = (one.planned - rows[-1]["updates"]) * spent / updates
    return float(max(0.0, ahead - max(0.0, now - rows[-1]["time/at"])))


def _json(path: Path) -> tuple[Any, str]:
    """Return the content of a JSON file and what is wrong with it; nothing is where it is not
    there."""
    try:
        return json.loads(path.read_bytes()), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, str(error)


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _tail(path: Path) -> bytes:
    """Return the phases in the last part of metrics.jsonl, and the last 64 kB whole, for the
    pace."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            content = file.read()
    except OSError:
        return b""
    if len(content) > 1 << 14:
        pace = content.find(b"\n", max(0, len(content) - (1 << 14))) + 1
    else:
        pace = 0
    return (
        b"\n".join(match[0] for match in _PHASE.finditer(content, 0, pace)) + b"\n" + content[pace:]
    )


def _spent(status: Mapping[str, Any]) -> float:
    """Return the seconds of all attempts."""
    time = status.get("time")
    kinds = time.get("run") if isinstance(time, dict) else None
    if isinstance(kinds, dict):
        return sum(_time(value) for value in kinds.values())
    return 0.0


def _count(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST:
        return value
    return 0


def _time(value: Any) -> float:
    if isinstance(value, int | float) and abs(value) < MOST:
        return float(value)
    return 0.0


def _moment(value: Any) -> float:
    """Return a time in seconds since 1970; 0.0 where it is none, or none of the years that a
    calendar can name."""
    found = _time(value)
    if 0.0 < found < LATEST:
        return found
    return 0.0


def _in_a_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _shortened(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length - 3]}..."
