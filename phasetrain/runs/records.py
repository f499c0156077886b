"""Typed records of the files of a run folder, which `phasetrain.runs.view` reads: status.json,
attempts.jsonl, metrics.jsonl, plan.json and environment.json.

Damaged fields have their defaults. Each record keeps the whole JSON object as `content`.
"""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phasetrain.runs.direction import Direction, parse_directions
from phasetrain.runs.owner import is_lease_expired

STATUS = "status.json"
ATTEMPTS = "attempts.jsonl"
METRICS = "metrics.jsonl"
PLAN = "plan.json"
ENVIRONMENT = "environment.json"
PREDICTIONS = "predictions.json"

READ_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
)
"""Exceptions raised while reading a torn or altered file."""

MAX_COUNT = 1 << 63
"""Counts and durations from here on are damage."""

MAX_TIMESTAMP = 253402300800.0
"""Seconds from 1970 to the year 10000, the last one that a calendar can format."""


def parse_number(value: Any) -> float:
    """Return a value as float, NaN if it is none; JSON holds non-finite numbers as text."""
    # float(True) is 1.0, which no writer of these files means
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def parse_count(value: Any) -> int:
    """Return a value as a count, 0 if it is none."""
    # bool is a subclass of int
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_COUNT:
        return value
    return 0


def _parse_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return ""


def parse_mapping(value: Any) -> dict[str, Any]:
    """Return a value as a mapping with text keys, empty if it is none."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return {}


def _parse_durations(value: Any) -> dict[str, float]:
    """Return kind of work -> seconds without damaged values."""
    durations = {work: parse_number(seconds) for work, seconds in parse_mapping(value).items()}
    return {work: seconds for work, seconds in durations.items() if 0 <= seconds < MAX_COUNT}


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of the process that writes status.json.

    Attributes:
        at: seconds since 1970; 0.0 if unknown.
        pid: process id; 0 if unknown.
        host: name of its machine.
    """

    at: float = 0.0
    pid: int = 0
    host: str = ""

    @classmethod
    def from_json(cls, content: Any) -> "Heartbeat":
        """Read the entry of status.json."""
        entries = parse_mapping(content)
        at = parse_number(entries.get("at"))
        pid = entries.get("pid")
        # os.kill with a negative pid would signal a whole process group
        if not isinstance(pid, int) or isinstance(pid, bool) or pid < 0:
            pid = 0
        if not 0 < at < MAX_TIMESTAMP:  # also false for NaN
            at = 0.0
        return cls(at=at, pid=pid, host=_parse_text(entries.get("host")))

    def is_alive(self, now: float | None = None) -> bool:
        """Return whether the process may still be running, as far as this machine can tell.

        The one definition of a killed run: its heartbeat is older than the lease of the lock, or it
        ran on this machine and its process is gone.
        """
        if is_lease_expired(self.at, time.time() if now is None else now):
            return False
        # A pid means nothing on another host: there, only the lease counts.
        if self.host != socket.gethostname() or not self.pid:
            return True
        return process_exists(self.pid)


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine has this id."""
    try:
        os.kill(pid, 0)  # signal 0 is never delivered: the kernel only checks the pid
    except (ProcessLookupError, OverflowError):  # no pid is larger than a C int
        return False
    except OSError:  # a process of another user cannot be signalled
        return True
    return True


@dataclass(frozen=True)
class StatusRecord:
    """The state of a run, or of one of its earlier attempts.

    Attributes:
        state: `running`, `finished`, `paused`, `interrupted`, `preempted` or `failed`; empty if
            unknown.
        attempt: number of the attempt, from 1; 0 if unknown.
        updates: updates done.
        reached: largest number of updates that any attempt has reached.
        reason: why the run ended or stopped.
        cause: why earlier attempts made no progress.
        exit_code: exit code of the process; None while it runs.
        checkpoint: name of the newest checkpoint.
        digest: SHA-256 of the final weights; empty before the run has finished.
        idle_attempts: attempts in a row without a new checkpoint.
        started_from: sequence number of the checkpoint that the attempt resumed from.
        resumed_at: updates of this checkpoint; 0 if the attempt started the run.
        broken: attempts that were killed, failed or were preempted.
        attempt_seconds: kind of work -> seconds, of the attempt.
        run_seconds: the same of all attempts together.
        heartbeat: last sign of life.
        content: the whole JSON object.
    """

    state: str = ""
    attempt: int = 0
    updates: int = 0
    reached: int = 0
    reason: str = ""
    cause: str = ""
    exit_code: int | None = None
    checkpoint: str = ""
    digest: str = ""
    idle_attempts: int = 0
    started_from: int = 0
    resumed_at: int = 0
    broken: int = 0
    attempt_seconds: Mapping[str, float] = field(default_factory=dict)
    run_seconds: Mapping[str, float] = field(default_factory=dict)
    heartbeat: Heartbeat = Heartbeat()
    content: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Any) -> "StatusRecord":
        """Read the content of status.json, or of a line of attempts.jsonl."""
        entries = parse_mapping(content)
        spent = parse_mapping(entries.get("time"))
        code = entries.get("exit_code")
        if not isinstance(code, int) or isinstance(code, bool):
            code = None
        return cls(
            state=_parse_text(entries.get("state")),
            attempt=parse_count(entries.get("attempt")),
            updates=parse_count(entries.get("updates")),
            reached=parse_count(entries.get("reached")),
            reason=_parse_text(entries.get("reason")),
            cause=_parse_text(entries.get("cause")),
            checkpoint=_parse_text(entries.get("checkpoint")),
            digest=_parse_text(entries.get("digest")),
            idle_attempts=parse_count(entries.get("idle_attempts")),
            started_from=parse_count(entries.get("started_from")),
            resumed_at=parse_count(entries.get("resumed_at")),
            exit_code=code,
            broken=parse_count(spent.get("broken")),
            attempt_seconds=_parse_durations(spent.get("attempt")),
            run_seconds=_parse_durations(spent.get("run")),
            heartbeat=Heartbeat.from_json(entries.get("heartbeat")),
            content=entries,
        )

    def observe_state(self, now: float | None = None) -> str:
        """Return the state, `killed` if the run is said to be running and gives no sign of life."""
        if self.state == "running" and not self.heartbeat.is_alive(now):
            return "killed"
        return self.state


@dataclass(frozen=True)
class PlanRecord:
    """The facts of a run before its first step.

    Attributes:
        updates: planned updates; 0 if unknown.
        differs: key, value and source of each setting that is not the default.
        facts: name -> value of the facts about the data that parts were built with.
        directions: metric, without its split -> which values are better.
        content: the whole JSON object.
    """

    updates: int = 0
    differs: tuple[tuple[str, Any, str], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    directions: Mapping[str, Direction | None] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Any) -> "PlanRecord":
        """Read the content of plan.json."""
        entries = parse_mapping(content)
        rows = entries.get("differs")
        if not isinstance(rows, list):
            rows = []
        return cls(
            updates=parse_count(entries.get("updates")),
            differs=tuple(
                (str(row[0]), row[1], str(row[2]))
                for row in rows
                if isinstance(row, list) and len(row) == 3
            ),
            facts=parse_mapping(entries.get("facts")),
            directions=parse_directions(entries.get("directions")),
            content=entries,
        )


@dataclass(frozen=True)
class EnvironmentRecord:
    """Where the newest attempt ran.

    Attributes:
        processes: world size.
        threads: threads per process; None if unknown.
        device: such as `cpu` or `cuda`.
        config_dir: folder with the user's configs; empty for none.
        folder: working directory; empty if unknown.
        content: the whole JSON object.
    """

    processes: int = 1
    threads: int | None = None
    device: str = ""
    config_dir: str = ""
    folder: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def deviations(self) -> list[str]:
        """How the run differs from a run of its newest command alone."""
        # the name of the key in existing run folders
        return format_deviations(self.content.get("departures"))

    @property
    def changes(self) -> list[tuple[int, str]]:
        """Number of updates after which config, data or code changed, and a sentence about it."""
        departures = _list_departures(self.content.get("departures"))
        return [(updates, text) for updates, _, text in departures if updates]

    @classmethod
    def from_json(cls, content: Any) -> "EnvironmentRecord":
        """Read the content of environment.json."""
        entries = parse_mapping(content)
        return cls(
            processes=parse_count(entries.get("processes")) or 1,
            threads=parse_count(entries.get("threads")) or None,
            device=_parse_text(entries.get("device")),
            config_dir=_parse_text(entries.get("config_dir")),
            folder=_parse_text(entries.get("folder")),
            content=entries,
        )


def format_deviations(departures: Any) -> list[str]:
    """Return a sentence for each deviation of a run from a run of its newest command alone.

    Args:
        departures: the entry of environment.json, as made by
            `phasetrain.app.train.resume.list_deviations`; parts that were damaged by hand are left
            out.
    """
    return [
        f"{_format_span(updates, until)}: {text}"
        for updates, until, text in _list_departures(departures)
    ]


def _list_departures(departures: Any) -> list[tuple[int, Any, str]]:
    """Return the number of updates before each deviation, the number at its end or None, and a
    sentence about it."""
    if not isinstance(departures, list):
        return []
    return [
        (entry["updates"], entry.get("until"), " ".join("; ".join(map(str, entry["what"])).split()))
        for entry in departures
        if isinstance(entry, dict)
        and isinstance(entry.get("updates"), int)
        and isinstance(entry.get("what"), list)
    ]


def _format_span(updates: int, until: Any) -> str:
    start = f"from update {updates}" if updates else "from the start"
    if isinstance(until, int):
        return f"{start} until update {until}"
    return f"{start} on" if updates else start


@dataclass(frozen=True)
class MetricsLine:
    """A line of metrics.jsonl.

    Attributes:
        kind: `step`, `phase`, or the kind of a hook, such as `memory`.
        updates: updates done when it was written.
        content: the whole JSON object.
    """

    kind: str
    updates: int
    content: Mapping[str, Any]

    @property
    def split(self) -> str:
        """The split of the step or phase; empty if it has none."""
        return _parse_text(self.content.get("split"))

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return parse_count(self.content.get("epoch"))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of a phase by name, without the split; empty for other lines."""
        if self.kind != "phase":
            return {}
        metrics = parse_mapping(self.content.get("metrics"))
        return {name: parse_number(value) for name, value in metrics.items()}

    @property
    def directions(self) -> dict[str, Direction | None]:
        """Which values are better, by the name of the metric; empty in runs of version 0.1."""
        return parse_directions(self.content.get("directions"))

    def comparable_content(self) -> dict[str, Any]:
        """Return the content that equal runs have in common, to compare two runs.

        Times differ between equal runs, and runs of version 0.1 have no directions.
        """
        return {
            key: value for key, value in self.content.items() if key not in ("time", "directions")
        }

    def flatten(self) -> dict[str, Any]:
        """Return the line as a flat row: metrics as `split/name`, other mappings as `key/name`."""
        row: dict[str, Any] = {}
        for key, value in self.content.items():
            if key == "directions":
                continue
            if isinstance(value, Mapping):
                prefix: Any = key
                if key == "metrics":
                    prefix = self.content.get("split")
                row |= {f"{prefix}/{name}": _restore_number(item) for name, item in value.items()}
            # not of every text: a hook may log the word "nan"
            elif key in ("loss", "lr"):
                row[key] = _restore_number(value)
            else:
                row[key] = value
        return row


def _restore_number(value: Any) -> Any:
    """Return a non-finite number, which JSON holds as text, as a float."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value


def is_scalar(value: Any) -> bool:
    """Return whether a value of a row is a number that a float can hold."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max  # JSON has integers of any size
    return isinstance(value, float)


def parse_metrics_line(line: bytes) -> MetricsLine | None:
    """Read a line of metrics.jsonl; None if it was torn by a kill or has an unknown form."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        # A kill tears the last line; a resume cuts it off, a reader has to bear it until then.
        return None
    if not isinstance(content, dict):
        return None
    line_kind = content.get("kind")
    updates = content.get("updates")
    if not isinstance(line_kind, str) or not isinstance(updates, int) or isinstance(updates, bool):
        return None
    return MetricsLine(line_kind, updates, content)


def parse_metrics(data: bytes) -> list[MetricsLine]:
    """Read a part of metrics.jsonl that begins at a line; damaged lines are skipped."""
    lines = (parse_metrics_line(line) for line in data.splitlines())
    return [line for line in lines if line is not None]


def shorten_error(error: BaseException) -> str:
    """Return the message of an error in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]
