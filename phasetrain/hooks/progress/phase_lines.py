"""The lines of completed phases, one per train phase with the tests that follow it, and the latest
and best values of every metric for the last lines."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.runs.direction import Direction
from phasetrain.runtime.format import format_duration, format_metric
from phasetrain.runtime.terminal import SCREEN_LOG, Terminal

ALL_LINES = 20
"""Number of train phases that are printed in any case."""

INTERVAL = 0.5
"""Minimum seconds between two lines after these; the last train phase is printed too."""

LONG_SECONDS = 30.0
"""Without a live view, a phase that took this many seconds is printed at once."""

COLUMN_GAP = "  "

MAX_BEST_METRICS = 6
"""Maximum number of metrics in the last line; metrics.jsonl has all of them."""

COLUMNS = ("metric", "last", "at update", "best", "at update")

Measured = tuple[float, int]
"""Value of a metric, and the update after which it was measured."""


@dataclass(frozen=True)
class CompletedPhase:
    """A completed phase, its metrics and its duration in seconds."""

    phase: Phase
    metrics: Mapping[str, float]
    seconds: float


class PhaseLines:
    """Prints a line per train phase, with the tests that follow it; if verbose, one per phase.

    On a terminal that is wide enough, the lines are rows of a table, whose header is printed again
    when the columns change. log.txt gets a line per phase at once.

    Args:
        terminal: output.

    Attributes:
        epochs: number of epochs of the plan.
        splits: splits of the plan.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.epochs = 0
        self.splits: tuple[str, ...] = ()
        self._waiting: list[CompletedPhase] = []
        self._columns: tuple[str, ...] | None = None
        self._begun = 0
        self._had_test = False
        self._printed = 0.0

    def add(self, phase: Phase, metrics: Mapping[str, float], seconds: float) -> None:
        """Add a completed phase and its duration in seconds."""
        scores = "".join(f"{name} {value:.4f}  " for name, value in metrics.items())
        epoch = f"epoch {format_epoch(phase, self.epochs)}"
        text = f"{epoch}  {phase.split:<5}  {scores}({format_duration(seconds)})"
        SCREEN_LOG.info(text)
        if self.terminal.verbosity == "verbose":
            self.terminal.print_line(text)
            return
        self._waiting = [*self._waiting, CompletedPhase(phase, dict(metrics), seconds)]
        if not self.terminal.live and seconds >= LONG_SECONDS:
            self.end()

    def begin(self, phase: Phase) -> None:
        """Print the pending phases before a train phase, unless phases end too fast to be read. A
        test after epochs without one is always printed.

        An epoch that a changed plan has divided where the run was resumed gets one line, the one of
        its end: the line of a piece without a test is not printed.
        """
        pieces = self._waiting
        now = time.monotonic()
        self._begun += 1
        has_test = any(not piece.phase.is_train for piece in pieces)
        is_fast = self._begun > ALL_LINES and now - self._printed < INTERVAL
        if all(piece.phase.is_train and piece.phase.epoch == phase.epoch for piece in pieces) or (
            is_fast and (self._had_test or not has_test)
        ):
            self._waiting = []
        else:
            self._printed = now
        self._had_test = has_test
        self.end()

    def end(self) -> None:
        """Print the pending phases."""
        waiting = self._waiting
        self._waiting = []
        if not waiting:
            return
        width = self.terminal.width
        columns = self._choose_columns(waiting)
        # A table that will be too wide for the first test would end after one row.
        names = dict.fromkeys(name for completed in waiting for name in completed.metrics)
        others = (f"{split}/{name}" for split in self.splits for name in names)
        expected = tuple(dict.fromkeys((*columns, *others)))
        if width is not None and len(self._format_header(expected)) <= width:
            if columns != self._columns:
                self._columns = columns
                self.terminal.print_line(self._format_header(columns), style="bold")
            self.terminal.print_line(self._format_row(columns, waiting))
            return
        self._columns = None
        line = self._format_line(waiting)
        if width is None or len(line) <= width:
            self.terminal.print_line(line)
            return
        for completed in waiting:
            rows = wrap(self._format_line([completed]), width, subsequent_indent="    ")
            self.terminal.print_line("\n".join(rows))

    def pending(self) -> str:
        """Return the line of phases that are not printed yet."""
        waiting = self._waiting
        if not waiting:
            return ""
        if self._columns is not None and set(_metric_cells(waiting)) <= set(self._columns):
            return self._format_row(self._columns, waiting)
        return self._format_line(waiting)

    def _choose_columns(self, waiting: list[CompletedPhase]) -> tuple[str, ...]:
        """Return the current columns, followed by new ones; columns keep their order."""
        columns = tuple(_metric_cells(waiting))
        if self._columns is None:
            return columns
        return (*self._columns, *(name for name in columns if name not in self._columns))

    def _format_line(self, waiting: list[CompletedPhase]) -> str:
        parts = []
        for completed in waiting:
            metrics = [
                f"{name} {format_metric(value)}" for name, value in completed.metrics.items()
            ]
            parts.append(" ".join((completed.phase.split, *metrics)))
        epoch = f"epoch {format_epoch(waiting[0].phase, self.epochs)}"
        return COLUMN_GAP.join((epoch, *parts, f"({_format_total_time(waiting)})"))

    def _format_header(self, columns: tuple[str, ...]) -> str:
        return COLUMN_GAP.join(
            (
                "epoch".rjust(self._epoch_width),
                *(name.rjust(_column_width(name)) for name in columns),
                "time".rjust(8),
            )
        )

    def _format_row(self, columns: tuple[str, ...], waiting: list[CompletedPhase]) -> str:
        cells = _metric_cells(waiting)
        epoch = format_epoch(waiting[0].phase, self.epochs).rjust(self._epoch_width)
        values = (
            (format_metric(cells[name]) if name in cells else "").rjust(_column_width(name))
            for name in columns
        )
        return COLUMN_GAP.join((epoch, *values, _format_total_time(waiting).rjust(8)))

    @property
    def _epoch_width(self) -> int:
        return max(5, 2 * len(str(self.epochs)) + 1)


def format_epoch(phase: Phase, epochs: int) -> str:
    """Return the epoch of a phase and the epochs of its plan, as in `1/3`, or `0/0` without."""
    return f"{min(phase.epoch + 1, epochs)}/{epochs}"


def _metric_cells(waiting: list[CompletedPhase]) -> dict[str, float]:
    return {
        f"{ended.phase.split}/{name}": value
        for ended in waiting
        for name, value in ended.metrics.items()
    }


def _column_width(name: str) -> int:
    return max(len(name), 8)


def _format_total_time(waiting: list[CompletedPhase]) -> str:
    return format_duration(sum(completed.seconds for completed in waiting))


class Results:
    """Keeps the latest and the best value of every metric, by split and name."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], Measured] = {}
        self._best: dict[tuple[str, str], Measured] = {}

    def __bool__(self) -> bool:
        return bool(self._latest)

    def add(self, split: str, name: str, measured: Measured, direction: Direction | None) -> None:
        """Add a value; of equal ones the first is the best. Without a direction none is."""
        key = (split, name)
        self._latest[key] = measured
        if direction is None:
            return
        best = self._best.get(key)
        if best is None or math.isnan(best[0]) or direction.is_better(measured[0], best[0]):
            self._best[key] = measured

    def summarize_best(self, monitored: str = "") -> str:
        """Return the best values on one line, of test splits if there are any; if there are too
        many, the one of the monitored metric comes first."""
        keys = [key for key in self._best if key[0] != TRAIN] or list(self._best)
        if len(keys) > MAX_BEST_METRICS:
            keys.sort(key=lambda key: "/".join(key) != monitored)
        parts = []
        for split, name in keys[:MAX_BEST_METRICS]:
            value, update = self._best[split, name]
            parts.append(f"{split}/{name} {format_metric(value)} (update {update})")
        if len(keys) > MAX_BEST_METRICS:
            parts.append(f"{len(keys) - MAX_BEST_METRICS} more in metrics.jsonl")
        return ", ".join(parts)

    def make_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table with `COLUMNS`, test splits first."""
        rows: list[tuple[str, ...]] = []
        for split, name in sorted(self._latest, key=lambda key: key[0] == TRAIN):
            value, update = self._latest[split, name]
            best_cells = ("-", "-")
            if (split, name) in self._best:
                best, best_update = self._best[split, name]
                best_cells = (format_metric(best), str(best_update))
            rows.append((f"{split}/{name}", format_metric(value), str(update), *best_cells))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return all values as JSON data."""
        return {
            "results": [[*key, *measured] for key, measured in self._latest.items()],
            "best": [[*key, *measured] for key, measured in self._best.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all values; checkpoints of an earlier version have no best ones."""
        self._latest = {(split, name): (value, at) for split, name, value, at in state["results"]}
        best = state.get("best", state["results"])
        self._best = {(split, name): (value, at) for split, name, value, at in best}
