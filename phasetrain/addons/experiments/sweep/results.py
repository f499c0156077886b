"""The results of a sweep: a row per run, as a table, JSON or CSV."""

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.options import ComparisonSettings
from phasetrain.addons.experiments.sweep.groups import ConfigGroup, group_runs
from phasetrain.addons.experiments.sweep.jobs import JobRecord, read_job_records
from phasetrain.addons.experiments.sweep.override_text import hash_overrides, split_words
from phasetrain.addons.experiments.sweep.prune_record import PruneRecord, describe_spent
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun, list_metrics
from phasetrain.app.list_runs import RunSummary, summarize_run
from phasetrain.config.nested import to_json_value
from phasetrain.errors import EXIT_CODES
from phasetrain.runs.direction import Direction, Objective
from phasetrain.runs.history import read_history
from phasetrain.runs.records import is_scalar
from phasetrain.runtime.format import format_duration, format_metric

STATE = "state"
"""The column that a narrow table omits last."""

OPTIONAL_COLUMNS = ("updates", "at update", "last", "time", "folder")
"""Columns that a narrow table omits, in this order; then it omits the other test metrics."""

MOST_METRICS = 4
"""Other test metrics in a table; the files have all of them."""

FRAME = 3
"""Characters around a cell."""

DIGITS = 9
"""Longer numbers are shown with six significant digits."""

LOG_TAIL_BYTES = 1 << 14
"""Bytes read from the end of a log."""


@dataclass(frozen=True)
class Results:
    """All runs of a sweep folder, the best ones first.

    Attributes:
        folder: the sweep folder.
        monitor: the metric by which runs are compared, with a minus sign if smaller is better.
        runs: one entry per run.
        finished_before: number of runs that had finished before this command.
        comparison: how configs are compared that folds or seeds repeat.
        prune: how the sweep was pruned; None if it was not.
    """

    folder: str
    monitor: str
    runs: Sequence[SweepRun]
    finished_before: int = 0
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    prune: PruneRecord | None = None

    @classmethod
    def read(
        cls,
        folder: str,
        monitor: str = "",
        planned: Mapping[str, Sequence[str]] | None = None,
        sweep: str = "",
        comparison: ComparisonSettings | None = None,
    ) -> "Results":
        """Read the folder of a sweep, finished or not.

        Args:
            folder: the sweep folder.
            monitor: metric by which runs are compared; by default the first one that they have
                measured.
            planned: hash -> swept overrides of the runs that the sweep will start.
            sweep: identity of this call of `sweep`; records of other calls count as earlier ones.
            comparison: as in the class.
        """
        records = {hash_overrides(record.overrides): record for record in read_job_records(folder)}
        runs = [_read_run(folder, name, record, monitor) for name, record in records.items()]
        for name, words in (planned or {}).items():
            if name not in records:
                runs.append(SweepRun(name, split_words(words), "waiting"))
        prune = PruneRecord.read(folder)
        if prune is not None:
            runs = [_add_rungs(run, prune) for run in runs]
        objective = _choose_objective(monitor, runs)
        order = {name: index for index, name in enumerate(planned or ())}
        # the second sort is stable: runs with equal results keep the order of the sweep
        runs.sort(key=lambda run: (order.get(run.name, len(order)), run.name))
        runs.sort(key=lambda run: _rank(run, objective))
        earlier = {
            name
            for name, record in records.items()
            if record.passed_over or (sweep and record.sweep != sweep)
        }
        finished_before = sum(run.name in earlier and run.state == "finished" for run in runs)
        comparison = comparison or ComparisonSettings()
        return cls(folder, str(objective), runs, finished_before, comparison, prune)

    @property
    def metric(self) -> str:
        """The metric by which runs are compared, without a sign."""
        return Objective.parse(self.monitor).metric

    @property
    def keys(self) -> list[str]:
        """The swept keys."""
        return list(dict.fromkeys(key for run in self.runs for key in run.swept))

    @cached_property
    def groups(self) -> list[ConfigGroup]:
        """The configs that the runs repeat with other folds or seeds, the best mean first; empty if
        no fold or seed is swept."""
        return group_runs(self.runs, Objective.parse(self.monitor), self.comparison)

    def list_rows(self) -> list[SweepRun]:
        """Return the runs as tables show them: the best first, or by config and fold or seed."""
        if not self.groups:
            return list(self.runs)
        by_name = {run.name: run for run in self.runs}
        return [by_name[name] for group in self.groups for name in group.runs]

    @property
    def metrics(self) -> list[str]:
        """The other test metrics that the runs have measured."""
        return list_metrics(self.runs)

    def list_columns(self) -> list[str]:
        """Return the columns of the table."""
        best = f"best {self.metric}".strip()
        rung = ["rung"] if self.prune else []
        metrics = self.metrics[:MOST_METRICS]
        return [
            *(*self.keys, best, *metrics, "at update", "last"),
            *(*rung, "updates", "time", STATE, "folder"),
        ]

    def make_table(
        self, width: int | None = None, most: int | None = None
    ) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows, without the optional columns that do not fit.

        Args:
            width: available characters; None for any number.
            most: maximum number of rows.
        """
        names = self.list_columns()
        rows = [self.format_cells(run) for run in self.list_rows()[:most]]
        widths = [
            max(len(row[column]) for row in [names, *rows]) + FRAME for column in range(len(names))
        ]
        kept = list(range(len(names)))
        metrics = self.metrics[:MOST_METRICS]
        for name in (*OPTIONAL_COLUMNS, *reversed(metrics), STATE):
            if width is None or sum(widths[column] for column in kept) < width:
                break
            # searched after the swept keys, one of which may have the same name
            kept.remove(names.index(name, len(self.keys)))
        return [names[column] for column in kept], [
            [row[column] for column in kept] for row in rows
        ]

    def format_cells(self, run: SweepRun) -> list[str]:
        """Return a cell per column of the table."""
        best = at = last = "-"
        if run.best is not None:
            best = format_metric(run.best)
            at = str(run.best_updates)
        if run.last is not None:
            last = format_metric(run.last)
        rung = []
        if self.prune:
            rung = [f"{run.rung}/{run.rungs}"]
        updates = time = "-"
        if run.planned:
            updates = f"{run.updates}/{run.planned}"
        if run.seconds:
            time = format_duration(run.seconds)
        return [
            *(shorten_number(run.swept.get(key, "-")) for key in self.keys),
            best,
            *(_format_metric(run.metrics.get(name)) for name in self.metrics[:MOST_METRICS]),
            at,
            last,
            *rung,
            updates,
            time,
            run.state,
            run.name,
        ]

    def title(self) -> str:
        """Return the number of runs by state, in one line."""
        counts = Counter(run.state for run in self.runs)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        earlier = ""
        if self.finished_before:
            earlier = f", {self.finished_before} of them before this command"
        spent = ""
        if self.prune:
            spent = f"; {describe_spent(self.runs)}"
        return f"{len(self.runs)} runs in {self.folder}: {states}{earlier}{spent}"

    def format_json(self) -> str:
        """Return the runs, and the groups that repeat a config, as JSON; non-finite numbers are
        null."""
        content: dict[str, Any] = {
            "monitor": self.monitor,
            "swept": self.keys,
            "runs": [asdict(run) for run in self.runs],
            "groups": [asdict(group) for group in self.groups],
            "detect": self.comparison.detect,
        }
        if self.prune:
            content["prune"] = self.prune.describe()
        return json.dumps(to_json_value(content), indent=1) + "\n"

    def format_csv(self) -> str:
        """Return the runs as CSV, with a column per swept key and per test metric."""
        names = [name for name in SweepRun.__dataclass_fields__ if name not in ("swept", "metrics")]
        metrics = self.metrics
        text = io.StringIO()  # the storage replaces whole files, so that none is seen half-written
        writer = csv.writer(text)
        writer.writerow([*self.keys, *names, *metrics])
        for run in self.runs:
            swept = [run.swept.get(key, "") for key in self.keys]
            values = [run.metrics.get(name, "") for name in metrics]
            writer.writerow([*swept, *(vars(run)[name] for name in names), *values])
        return text.getvalue()


def _add_rungs(run: SweepRun, prune: PruneRecord) -> SweepRun:
    if run.name not in prune.rungs:  # of an earlier sweep in the same folder
        return run
    passed = prune.count_passed(run.name, run.updates, run.state)
    return replace(run, rung=passed, rungs=prune.levels + 1)


def _choose_objective(monitor: str, runs: Sequence[SweepRun]) -> Objective:
    """Return the metric that runs are compared by, with the direction that they have recorded."""
    metric = Objective.parse(monitor).metric
    for run in runs:
        if run.metric and run.metric == (metric or run.metric):
            return Objective(run.metric, Direction(run.direction))
    return Objective.parse(monitor)


def _read_run(folder: str, name: str, record: JobRecord, monitor: str) -> SweepRun:
    # not `record.folder`: the folder of the sweep may have been moved since
    summary = summarize_run(Path(folder, name), monitor)
    state = summary.state
    error = summary.error
    if state == "planned":  # it has no status: the process has failed before, or never started
        state = "failed" if record.exit_code else "waiting"
    # A config that is refused ends a run before it has a status: its last words are in the log.
    if record.exit_code and not error:
        # The other codes say less than the last line of the log, or belong to other commands.
        meaning = f": {EXIT_CODES[record.exit_code]}" if 2 <= record.exit_code <= 6 else ""
        last_line = read_last_line(Path(folder, f"{name}.log"))
        error = last_line or f"exit code {record.exit_code}{meaning}"
    is_complete = state in ("finished", "paused")
    return SweepRun(
        name,
        record.swept,
        state,
        metric=summary.metric,
        best=summary.best,
        best_updates=summary.best_updates,
        last=summary.last,
        updates=summary.updates,
        planned=summary.planned,
        seconds=summary.seconds,
        folder=f"{folder}/{name}",
        # A sweep that was killed has not seen the end of this process.
        exit_code=0 if is_complete and record.exit_code is None else record.exit_code,
        error="" if is_complete else error,
        direction=summary.direction,
        metrics=_read_metrics(Path(folder, name), summary),
    )


def _read_metrics(folder: Path, summary: RunSummary) -> dict[str, float]:
    """Return the other test metrics that a run has measured with its best value."""
    if summary.best is None:
        return {}
    return {
        metric: float(value)
        for row in read_history(folder)
        if row["kind"] == "phase" and row["updates"] == summary.best_updates
        for metric, value in row.items()
        if metric.startswith(f"{row['split']}/") and row["split"] != "train" and is_scalar(value)
        if metric != summary.metric
    }


def _format_metric(value: float | None) -> str:
    return "-" if value is None else format_metric(value)


def shorten_number(value: str) -> str:
    """Return a swept value with at most six significant digits; files hold all of them."""
    # A short value stays as the user wrote it: 1e-3, not 0.001.
    if len(value) <= DIGITS:
        return value
    try:
        return f"{float(value):.6g}"
    except ValueError:
        return value


def _rank(run: SweepRun, objective: Objective) -> tuple[bool, int, float]:
    """Return a sort key: the best run first, runs without a value last.

    Runs of a pruned sweep that were promoted come before those that were not: a value early in a
    run says little about its end.
    """
    if run.best is None or run.metric != objective.metric:
        return True, 0, 0.0
    return False, -run.rung, -objective.direction.score(run.best)


def read_last_line(path: Path) -> str:
    """Return the last line of a log that is not empty; empty if there is none."""
    try:
        with path.open("rb") as file:
            # Only the end of a log that may be large; the cut may fall within a character.
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
