"""What came out of a sweep: a row per run, as a table, JSON or CSV."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phasetrain.commands.runs.list_runs import summary
from phasetrain.commands.sweep.jobs import Record, records
from phasetrain.commands.sweep.override_text import digest
from phasetrain.runs.history import smaller_is_better
from phasetrain.runtime.format import format_duration, format_metric

DROPPED = ("updates", "at update", "last", "time", "folder", "state")
"""Columns that a narrow table goes without, the first ones first."""

FRAME = 3
"""Signs around a cell."""

MEANINGS = MappingProxyType(
    {
        2: ": its config was refused",
        3: ": data or config is no longer what its checkpoint was made with",
        4: ": its folder is in use",
        5: ": none of its checkpoints can be read",
        6: ": several attempts made no progress",
    }
)
"""Exit code -> what it says; see docs/config.md."""

DIGITS = 9
"""A number of more signs is shown with six significant digits."""

TAIL_BYTES = 1 << 14
"""How much is read of the end of a log."""


@dataclass(frozen=True)
class Result:
    """How a run of a sweep stands.

    Attributes:
        name: digest of its overrides, the name of its folder.
        swept: key -> value as text, of what other runs have otherwise.
        state: as in `tools/runs.py list`; `waiting` for one that was not started yet.
        best, best_updates, last: of the metric; None, and 0, where it was not measured.
        updates, planned: done, and of the whole run.
        seconds: that all its attempts have taken.
        folder: its run folder.
        exit_code: of its process; None where none has ended.
        error: why it ended, where it did not finish.
    """

    name: str
    swept: Mapping[str, str]
    state: str
    metric: str = ""
    best: float | None = None
    best_updates: int = 0
    last: float | None = None
    updates: int = 0
    planned: int = 0
    seconds: float = 0.0
    folder: str = ""
    exit_code: int | None = None
    error: str = ""


@dataclass(frozen=True)
class Results:
    """All runs of a sweep folder, the best ones first.

    Attributes:
        folder: the sweep folder.
        monitor: the metric by which they are compared, with a minus sign where smaller is better.
        runs: one per run.
        passed_over: how many had finished before.
    """

    folder: str
    monitor: str
    runs: Sequence[Result]
    passed_over: int = 0

    @classmethod
    def read(
        cls,
        folder: str,
        monitor: str = "",
        planned: Mapping[str, Sequence[str]] | None = None,
        sweep: str = "",
    ) -> "Results":
        """Read the folder of a sweep, finished or not.

        Args:
            folder: of the sweep.
            monitor: by which metric runs are compared; empty for what each of them has measured
                first.
            planned: digest -> swept words of the runs that there are to be.
            sweep: identity of the call of `sweep` beside which others are earlier ones.
        """
        found = {digest(one.overrides): one for one in records(folder)}
        runs = [_result(folder, name, one, monitor) for name, one in found.items()]
        for name, words in (planned or {}).items():
            if name not in found:
                swept = {key: value for key, _, value in (word.partition("=") for word in words)}
                runs.append(Result(name, swept, "waiting"))
        used = monitor or next((one.metric for one in runs if one.metric), "")
        if not monitor and smaller_is_better(used):
            used = f"-{used}"
        order = {name: place for place, name in enumerate(planned or ())}
        runs.sort(key=lambda one: (order.get(one.name, len(order)), one.name))
        runs.sort(key=lambda one: _rank(one, used))
        earlier = {
            name for name, one in found.items() if one.passed_over or (sweep and one.sweep != sweep)
        }
        return cls(
            folder, used, runs, sum(one.name in earlier and one.state == "finished" for one in runs)
        )

    @property
    def metric(self) -> str:
        """The metric by which they are compared, without a sign."""
        return self.monitor.removeprefix("-")

    @property
    def keys(self) -> list[str]:
        """What is swept."""
        return list(dict.fromkeys(key for one in self.runs for key in one.swept))

    def head(self) -> list[str]:
        """Return the columns of the table."""
        return [
            *self.keys,
            f"best {self.metric}".strip(),
            "at update",
            "last",
            "updates",
            "time",
            "state",
            "folder",
        ]

    def table(
        self, width: int | None = None, most: int | None = None
    ) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows, without the columns that do not fit.

        Args:
            width: signs that there is room for; None for any number.
            most: rows.
        """
        names = self.head()
        rows = [self.cells(one) for one in self.runs[:most]]
        kept = list(range(len(names)))
        for name in DROPPED if width is not None else ():
            if sum(max(len(row[place]) for row in [names, *rows]) + FRAME for place in kept) < (
                width or 0
            ):
                break
            kept.remove(names.index(name, len(self.keys)))
        return [names[place] for place in kept], [[row[place] for place in kept] for row in rows]

    def cells(self, one: Result) -> list[str]:
        """Return a run as a row of the table."""
        progress = f"{one.updates}/{one.planned}" if one.planned else "-"
        return [
            *(_told(one.swept.get(key, "-")) for key in self.keys),
            "-" if one.best is None else format_metric(one.best),
            str(one.best_updates) if one.best is not None else "-",
            "-" if one.last is None else format_metric(one.last),
            progress,
            format_duration(one.seconds) if one.seconds else "-",
            one.state,
            one.name,
        ]

    def title(self) -> str:
        """Return in a line how many runs there are, and how they stand."""
        states: dict[str, int] = {}
        for one in self.runs:
            states[one.state] = states.get(one.state, 0) + 1
        told = ", ".join(f"{count} {state}" for state, count in states.items())
        earlier = f", {self.passed_over} of them before this command" if self.passed_over else ""
        return f"{len(self.runs)} runs in {self.folder}: {told}{earlier}"

    def as_json(self) -> str:
        """Return the runs as JSON; numbers that JSON cannot hold are null."""
        rows = [{key: _finite(value) for key, value in asdict(one).items()} for one in self.runs]
        return (
            json.dumps({"monitor": self.monitor, "swept": self.keys, "runs": rows}, indent=1) + "\n"
        )

    def as_csv(self) -> str:
        """Return the runs as CSV, a column per swept key."""
        names = [name for name in Result.__dataclass_fields__ if name != "swept"]
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([*self.keys, *names])
        for one in self.runs:
            fields = asdict(one)
            writer.writerow(
                [*(one.swept.get(key, "") for key in self.keys), *(fields[name] for name in names)]
            )
        return text.getvalue()


def _result(folder: str, name: str, record: Record, monitor: str) -> Result:
    found = summary(Path(folder, name), monitor)
    state = found.state
    error = found.error
    if state == "planned":  # it has no status
        state = "failed" if record.exit_code else "waiting"
    if record.exit_code and not error:
        told = f"exit code {record.exit_code}{MEANINGS.get(record.exit_code, '')}"
        error = _last_line(Path(folder, f"{name}.log")) or told
    return Result(
        name,
        record.swept,
        state,
        found.metric,
        found.best,
        found.best_updates,
        found.last,
        found.updates,
        found.planned,
        found.seconds,
        f"{folder}/{name}",
        record.exit_code,
        error if state != "finished" else "",
    )


def _told(value: str) -> str:
    """Return a value as a person reads it; the files have all its digits."""
    try:
        if len(value) <= DIGITS:
            return value
        return f"{float(value):.6g}"
    except ValueError:
        return value


def _rank(one: Result, monitor: str) -> tuple[bool, float]:
    """Return what sorts the best run first, and those without a value last."""
    if one.best is None or one.metric != monitor.removeprefix("-"):
        return True, 0.0
    return False, one.best if monitor.startswith("-") else -one.best


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
