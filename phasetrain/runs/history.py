"""The measurements of a run as a table: rows of metrics.jsonl, scalars by name, smoothing, and the
best value of a metric."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runs.direction import (
    Direction,
    Objective,
    choose_split,
    guess_direction,
    resolve_objective,
)
from phasetrain.runs.records import MetricsLine, is_scalar, parse_count
from phasetrain.runs.view import RunView

if TYPE_CHECKING:
    from fvcore.common.history_buffer import HistoryBuffer

COUNTERS = frozenset({"updates", "phase", "epoch", "step", "samples"})
"""Columns that say when a row was written."""

Smoothing = Literal["median", "mean"]


@dataclass(frozen=True)
class Best:
    """The best value of a metric in a run.

    Attributes:
        metric: such as `test/accuracy`.
        value: the best one.
        epoch: epoch in which it was measured, from 0.
        updates: updates done before it was measured.
        checkpoint: path of the checkpoint with these weights; empty if none was kept.
        direction: which values of the metric are better.
    """

    metric: str
    value: float
    epoch: int
    updates: int
    checkpoint: str = ""
    direction: Direction = Direction.LARGER


class History(Sequence[dict[str, Any]]):
    """The lines of metrics.jsonl as a table, in their order.

    A row is a flat mapping. A logged step has `kind` "step", `updates`, `epoch`, `split`, `loss`,
    `lr` and the values that a loss logs as `logs/NAME`; a phase has `kind` "phase" and its metrics
    as `SPLIT/NAME`, such as `test/accuracy`. Values that may differ between equal runs are under
    `time/NAME`.

    Args:
        rows: rows of the table.
        directions: metric, such as `test/accuracy` -> which of its values are better, as recorded
            in the run; None if its meter says that none is.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]] = (),
        directions: Mapping[str, Direction | None] | None = None,
    ) -> None:
        self._rows = list(rows)
        self.directions = dict(directions or {})

    @classmethod
    def from_lines(cls, lines: Sequence[MetricsLine]) -> "History":
        """Return the table of some lines of metrics.jsonl."""
        directions = {
            f"{line.split}/{name}": direction
            for line in lines
            if line.kind == "phase"
            for name, direction in line.directions.items()
        }
        return cls([line.flatten() for line in lines], directions)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    def __getitem__(self, index: int | slice) -> "dict[str, Any] | History":
        if isinstance(index, slice):
            return History(self._rows[index], self.directions)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        steps = sum(row["kind"] == "step" for row in self)
        names = ", ".join(self.names)
        return f"History of {steps} steps and {len(self) - steps} other rows; scalars: {names}"

    @property
    def names(self) -> list[str]:
        """Names of all scalars except counters, in the order in which they appear first."""
        return list(
            dict.fromkeys(
                name
                for row in self
                for name, value in row.items()
                if name not in COUNTERS and is_scalar(value)
            )
        )

    def scalar(self, name: str) -> list[tuple[int, float]]:
        """Return (updates, value) of each row that has a scalar, such as `loss`, `lr` or
        `test/accuracy`.

        Raises:
            ConfigError: there is no such scalar (code `history.unknown_scalar`).
        """
        values = [
            (int(row["updates"]), float(row[name]))
            for row in self
            if name not in COUNTERS and is_scalar(row.get(name))
        ]
        if not values:
            near = did_you_mean(name, self.names) or "."
            names = ", ".join(self.names) or "none"
            raise ConfigError(
                f"{name!r}: the run has no such scalar{near} Known: {names}",
                code="history.unknown_scalar",
            )
        return values

    def buffer(self, name: str) -> "HistoryBuffer":
        """Return a scalar as fvcore's `HistoryBuffer`, whose iterations are updates.

        Example:
            >>> history.buffer("loss").median(20)
        """
        # Imported here: a list of a thousand runs reads histories too, and smooths nothing.
        from fvcore.common.history_buffer import HistoryBuffer

        values = self.scalar(name)
        buffer = HistoryBuffer(max_length=len(values) + 1)
        for updates, value in values:
            buffer.update(value, updates)
        return buffer

    def smoothed(
        self, name: str, window: int = 20, how: Smoothing = "median"
    ) -> list[tuple[int, float]]:
        """Return (updates, value) of a scalar, each value smoothed by fvcore's `HistoryBuffer`.

        Args:
            name: name of the scalar.
            window: number of latest values that are smoothed over, at least 1.
            how: their `median` or their `mean`.

        Raises:
            ConfigError: there is no such scalar.
            ValueError: a window below 1, or another `how`.
        """
        from fvcore.common.history_buffer import HistoryBuffer

        if window < 1 or how not in ("median", "mean"):
            raise ValueError(
                f"window = {window}, how = {how!r}: expected at least 1, and median or mean"
            )
        buffer = HistoryBuffer(max_length=max(2, window))
        smooth = buffer.median if how == "median" else buffer.avg
        smoothed = []
        for updates, value in self.scalar(name):
            buffer.update(value, updates)
            smoothed.append((updates, float(smooth(window))))
        return smoothed

    @property
    def last(self) -> dict[str, float]:
        """The latest value of every metric of a phase, by `split/name`."""
        return {name: value for row in self for name, value in _list_metrics(row).items()}

    def direction_of(self, metric: str) -> Direction | None:
        """Return which values of a metric are better: as recorded, else guessed from its name;
        None if neither says it."""
        if metric in self.directions:
            return self.directions[metric]
        return guess_direction(metric)

    def best(self, monitor: str | None = None, direction: Direction | None = None) -> Best | None:
        """Return the best finite value of a metric, the first one of equals; None if it was never
        measured, or nothing says which of its values are better.

        Args:
            monitor: such as `test/accuracy`, or `-test/loss` if smaller is better. By default the
                first metric of a validation split, else of a test, else of training.
            direction: which values are better; by default the minus sign decides, then the
                direction recorded in the run, then the name of the metric.
        """
        objective = Objective.parse(monitor or _choose_metric(self))
        metric = objective.metric
        if objective.direction is Direction.LARGER:
            direction = direction or self.direction_of(metric)
        else:
            direction = direction or Direction.SMALLER
        if direction is None:
            return None
        measured = [
            row
            for row in self
            if row["kind"] == "phase" and is_scalar(row.get(metric)) and math.isfinite(row[metric])
        ]
        if not measured:
            return None
        # `max` returns the first of equals: the earliest checkpoint with the best value
        row = max(measured, key=lambda row: direction.score(row[metric]))
        return Best(
            metric=metric,
            value=row[metric],
            epoch=parse_count(row.get("epoch")),
            updates=int(row["updates"]),
            direction=direction,
        )

    def best_monitored(self, monitor: str) -> Best | None:
        """Return the best value by a monitor of a config, in which no minus sign means that larger
        is better unless the run has recorded otherwise; None if it was never measured."""
        return self.best(monitor, resolve_objective(monitor, self.directions).direction)

    def steps(self) -> "Table":
        """Return a row for each logged step: `updates`, `epoch`, `loss`, `lr`, `logs/NAME`, ..."""
        return Table(
            [
                {key: value for key, value in row.items() if key != "kind"}
                for row in self
                if row["kind"] == "step"
            ]
        )

    def phases(self) -> "Table":
        """Return a row for each phase, with its metrics by their name alone: `split`, `epoch`,
        `updates`, `loss`, `accuracy`, ..."""
        return Table(
            [
                {
                    key.removeprefix(f"{row.get('split')}/"): value
                    for key, value in row.items()
                    if key != "kind"
                }
                for row in self
                if row["kind"] == "phase"
            ]
        )

    def frame(self, kind: Literal["phase", "step"] = "phase") -> Any:
        """Return the phases or the logged steps as a pandas DataFrame.

        Args:
            kind: rows of the table; both kinds in one table would leave half of it empty.

        Raises:
            ConfigError: pandas is not installed (code `install.missing`).
        """
        table = self.steps() if kind == "step" else self.phases()
        return table.frame()


class Table(list[dict[str, Any]]):
    """Rows with the same columns, each a flat mapping."""

    def frame(self) -> Any:
        """Return the table as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed (code `install.missing`).
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError(
                f"history.frame() needs pandas, which cannot be imported ({error}); install it "
                "with `pip install pandas`, or use the rows directly: a list of mappings",
                code="install.missing",
            ) from error
        return pd.DataFrame.from_records(list(self))


def _choose_metric(history: History) -> str:
    names = [name for name in history.last if history.direction_of(name)]
    # A metric of training flatters: the weights have seen the samples.
    tested = [name for name in names if not name.startswith("train/")]
    chosen = choose_split([Objective(name).split for name in tested])
    preferred = [name for name in tested if Objective(name).split == chosen]
    return next(iter([*preferred, *names]), "")


def read_history(run: str | Path | RunView) -> History:
    """Return the measurements of a run, or of the run in a folder; empty if there are none yet.

    Lines that were torn by a kill, and lines of unknown form, are skipped.
    """
    if not isinstance(run, RunView):
        run = RunView(run)
    return History.from_lines(run.lines)


def _list_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row by `split/name`; only rows of phases have some."""
    if row["kind"] != "phase":
        return {}
    prefix = f"{row.get('split')}/"
    return {
        name: value for name, value in row.items() if name.startswith(prefix) and is_scalar(value)
    }
