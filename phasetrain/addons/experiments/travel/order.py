"""Answers questions about the order of the samples of a run (`phasetrain order`)."""

import csv
import importlib
import io
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from phasetrain.addons.experiments.options import OrderOptions
from phasetrain.addons.experiments.travel.past_run import PastRun, open_past_run
from phasetrain.addons.experiments.travel.sample_order import COLUMNS, OrderTable, SampleOrder
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS
from phasetrain.runs.ledger import NORM
from phasetrain.runtime.format import format_count

log = logging.getLogger(__name__)

MAX_SHOWN = 1000
"""Maximum number of rows in the text."""

UPDATE_COLUMNS = ("update", "loss", "lr", "gradient_norm", "samples", "skipped")
"""Columns of the table `updates` of a query, from the ledger."""

ALLOWED = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
)
"""Actions that a query may take; no other one can open a file."""


@dataclass(frozen=True)
class Answer:
    """Rows of the order of a run.

    Attributes:
        columns: names of the columns.
        rows: the rows.
        checked: number of updates whose samples were compared with the ledger, up to `wrong`.
        wrong: the first update that has other samples in the ledger; None if there is none.
        acting: a hook that may change the data, if an update was not compared.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    checked: int
    wrong: int | None
    acting: str | None = None

    @property
    def exit_code(self) -> int:
        """0, or 1 if the ledger has other samples for an update, or a hook may change them."""
        return int(self.wrong is not None or self.acting is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the answer for programs."""
        return {
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "checked": self.checked,
            "wrong": self.wrong,
            "verdict": self.verdict,
        }

    def to_text(self) -> str:
        """Return a table for people."""
        if self.wrong is not None:
            return self.verdict
        shown = [self.columns, *self.rows[:MAX_SHOWN]]
        cells = [["" if value is None else str(value) for value in row] for row in shown]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in cells
        ]
        if len(self.rows) > MAX_SHOWN:
            lines.append(f"and {len(self.rows) - MAX_SHOWN} more rows; --out FILE.csv has all")
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """The comparison with the ledger in words."""
        if self.wrong is not None:
            return (
                f"update {self.wrong} had OTHER samples according to the ledger: data or config "
                "have changed, a hook has changed the data, or unreadable samples were dropped or "
                "replaced; so no rows are listed"
            )
        if self.acting is not None:
            return (
                f"HOOKS.{self.acting} uses the dataset: if it changes the order, rows of updates "
                "that were not compared with the ledger are WRONG"
            )
        if not self.checked:
            return "not compared with the ledger, which has none of these updates"
        updates = format_count(self.checked, "update")
        return f"samples of {updates} compared with the ledger: all equal"


def answer_order(folder: str, options: OrderOptions) -> Answer:
    """Answer a question about the order of a run, and write the rows to a file if asked to.

    Args:
        folder: the run folder; it is only read.
        options: the question.

    Raises:
        ConfigError: there is no such update or sample (codes `order.*`), or the query or the file
            is wrong.
    """
    # Before the run is opened, which takes a while.
    write = None if options.out is None else _choose_format(options.out)
    with open_past_run(folder, trust=options.trust) as past:
        order = SampleOrder(past)
        if options.sample is not None:
            last = order.updates
            table = order.find_sample(options.sample)
        else:
            first, last = _choose_range(options, order)
            table = order.list_updates(first, last)
        columns, rows = tuple(COLUMNS), list(table.list_rows())
        if options.sql is not None:
            columns, rows = _query(options.sql, past, table)
        if table.wrong is not None:
            rows = []
        is_compared = table.checked and last <= past.last
        acting = None if is_compared else _find_acting_hook(past)
        answer = Answer(columns, rows, table.checked, table.wrong, acting)
    if write is not None:
        assert options.out is not None
        try:
            write(options.out, answer)
        except OSError as error:
            raise ConfigError(
                f"--out {options.out}: it cannot be written: {error.strerror or error}; expected a "
                "path in a folder that exists",
                code="order.cannot_write",
            ) from error
    return answer


def _choose_range(options: OrderOptions, order: SampleOrder) -> tuple[int, int]:
    if options.update is not None:
        return options.update, options.update
    first, last = options.between or (1, order.updates)
    if first <= order.updates < last:
        log.info("--between %d %d: the run has %d updates", first, last, order.updates)
        last = order.updates
    return first, last


def _find_acting_hook(past: PastRun) -> str | None:
    """Return the label of a custom hook whose methods ask for a dataset and that does not only
    observe."""
    for label, section in past.setup.config.HOOKS.items():
        hook_class: Any = HOOKS.find(section.get("name", label), f"HOOKS.{label}.name")
        methods = [value for value in vars(hook_class).values() if isinstance(value, FunctionType)]
        asks = any("dataset_of" in method.__code__.co_names for method in methods)
        if asks and not getattr(hook_class, "observe_only", False):
            return str(label)
    return None


def _query(
    sql: str, past: PastRun, table: OrderTable
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return the columns and rows of a query on the tables `samples` and `updates`."""
    connection = sqlite3.connect(":memory:")
    try:
        types = {name: "TEXT" if name in ("source", "seed") else "INTEGER" for name in COLUMNS}
        declared = ", ".join(f'"{name}" {sql_type}' for name, sql_type in types.items())
        connection.execute(f"CREATE TABLE samples ({declared})")
        _insert(connection, "samples", len(COLUMNS), table.list_rows())
        declared = ", ".join(f'"{name}"' for name in UPDATE_COLUMNS)
        connection.execute(f"CREATE TABLE updates ({declared})")
        _insert(connection, "updates", len(UPDATE_COLUMNS), _list_records(past))
        connection.execute('CREATE INDEX by_sample ON samples ("sample")')
        connection.execute('CREATE INDEX by_update ON samples ("update")')
        connection.set_authorizer(
            lambda action, *_names: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
        )
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise sqlite3.OperationalError("it returns no rows")
        return tuple(column[0] for column in cursor.description), cursor.fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ConfigError(
            f"--sql: {error}; expected one SELECT on samples ({', '.join(COLUMNS)}) and updates "
            f"({', '.join(UPDATE_COLUMNS)}); `update` is a keyword of SQL, so write it in double "
            "quotes",
            code="order.invalid_query",
        ) from error
    finally:
        connection.close()


def _insert(
    connection: sqlite3.Connection, name: str, columns: int, rows: Iterator[tuple[Any, ...]]
) -> None:
    parameters = ", ".join("?" * columns)
    connection.executemany(f"INSERT INTO {name} VALUES ({parameters})", rows)


def _list_records(past: PastRun) -> Iterator[tuple[Any, ...]]:
    for update, record in (past.ledger or {}).items():
        norm = record.norm if record.flags & NORM else None
        yield update, record.loss, record.lr, norm, record.samples, int(record.is_skipped)


def _choose_format(path: str) -> Callable[[str, Answer], None]:
    """Return the function that writes a file.

    Raises:
        ConfigError: the format is unknown, or needs a library that is not installed (code
            `order.format`).
    """
    suffix = Path(path).suffix
    if suffix == ".csv":
        return _write_csv
    if suffix != ".parquet":
        raise ConfigError(f"--out {path}: expected FILE.csv or FILE.parquet", code="order.format")
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"--out {path}: Parquet needs pyarrow; install it, or write FILE.csv",
            code="order.format",
        ) from error
    return _write_parquet


def _write_csv(path: str, answer: Answer) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([answer.columns, *answer.rows])
    Path(path).write_text(text.getvalue(), encoding="utf-8")


def _write_parquet(path: str, answer: Answer) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    columns: Sequence[Sequence[Any]] = list(zip(*answer.rows, strict=True))
    columns = columns or [()] * len(answer.columns)
    parquet.write_table(arrow.table(dict(zip(answer.columns, columns, strict=True))), path)
