"""Writes CSV tables, one for steps and one per split, with each row once after any resume."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasetrain.addons.observe.trackers.base import Record, Tracker
from phasetrain.hooks.base import HOOKS, Run
from phasetrain.runtime.storage import LogFile

POSITION = ("updates", "epoch", "phase", "step", "samples")
"""First columns of every table; the last one is `at`, in seconds since 1970."""


@dataclass
class _Table:
    """A file and its columns.

    Attributes:
        columns: names of values and speeds.
        size: size in bytes; after a restore, the bytes that the checkpoint covers.
        file: None until `on_start`.
    """

    columns: tuple[str, ...]
    size: int = 0
    file: LogFile | None = None


@HOOKS.register("csv")
class CSV(Tracker):
    """Writes `csv/train-steps.csv` and a table per split, such as `csv/test.csv`.

    A value without a column in the current table starts a new file with one more column
    (`train-steps-2.csv`, ...). A resumed run truncates the files to the rows that the checkpoint
    covers. Equal runs differ in the columns `samples_per_second` and `at`, which come last.

    Args:
        every_updates: updates between two rows of train steps.
    """

    def __init__(self, every_updates: int = 10) -> None:
        super().__init__(every_updates)
        self._tables: dict[str, _Table] = {}

    def on_start(self, run: Run) -> None:
        """Truncate the tables to the checkpoint, and remove tables that started after it."""
        assert run.folder is not None, "the csv hook needs a run folder"
        storage = run.folder.storage
        root = run.folder.file("csv")
        storage.make_folder(root)
        for name in storage.list_names(root):
            if name.endswith(".csv") and name not in self._tables:
                storage.remove(f"{root}/{name}")
        for name, table in self._tables.items():
            table.file = run.folder.log(f"csv/{name}")
            table.size = table.file.truncate_lines(table.size)
            if not table.size:
                self._append_row(table, (*POSITION, *table.columns, "at"))

    def write(self, run: Run, record: Record) -> None:
        """Append a row."""
        values = {**record.values, **record.speeds}
        stem = f"{record.split}-steps" if record.kind == "step" else record.split
        table = self._find_table(run, stem, tuple(values))
        position = [vars(record)[name] for name in POSITION]
        row = [
            *position,
            # repr keeps every digit, so equal runs write equal bytes.
            *(repr(values[name]) if name in values else "" for name in table.columns),
            repr(record.at),
        ]
        self._append_row(table, row)

    def on_save(self, run: Run) -> None:
        """Flush all rows; the checkpoint hook syncs them before it commits."""
        self._flush_tables()

    def close(self) -> None:
        """Flush all rows."""
        self._flush_tables()

    def state_dict(self) -> dict[str, Any]:
        """Return size in bytes and columns of each table."""
        return {
            "tables": {name: [table.size, *table.columns] for name, table in self._tables.items()}
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore sizes and columns; `on_start` truncates the files."""
        entries = state["tables"].items()
        self._tables = {
            name: _Table(tuple(columns), int(size)) for name, (size, *columns) in entries
        }

    def _find_table(self, run: Run, stem: str, names: Sequence[str]) -> _Table:
        """Return the latest table if it has columns for these values, or else a new one."""
        pattern = re.compile(rf"{re.escape(stem)}(-\d+)?\.csv")
        number = sum(pattern.fullmatch(name) is not None for name in self._tables)
        latest = self._tables.get(_file_name(stem, number))
        if latest is not None and set(names) <= set(latest.columns):
            return latest
        columns_before = () if latest is None else latest.columns
        more = [name for name in names if name not in columns_before]
        # They differ between equal runs, and stay at the end so that the other columns can be
        # compared.
        speeds = [name for name in columns_before if name.endswith("per_second")]
        columns = (*(name for name in columns_before if name not in speeds), *more, *speeds)
        assert run.folder is not None
        table = _Table(columns, file=run.folder.log(f"csv/{_file_name(stem, number + 1)}"))
        self._tables[_file_name(stem, number + 1)] = table
        self._append_row(table, (*POSITION, *columns, "at"))
        return table

    def _append_row(self, table: _Table, row: Sequence[Any]) -> None:
        text = io.StringIO()
        # The csv module ends rows with CR LF by default.
        csv.writer(text, lineterminator="\n").writerow(row)
        line = text.getvalue().encode()
        assert table.file is not None
        table.file.write(line)
        table.size += len(line)

    def _flush_tables(self) -> None:
        for table in self._tables.values():
            if table.file is not None:
                table.file.flush_or_warn()


def _file_name(stem: str, number: int) -> str:
    if number < 2:
        return f"{stem}.csv"
    return f"{stem}-{number}.csv"
