"""Writes tables for a spreadsheet or pandas: a file of steps and one for each split; each row once
after resumes."""

import csv
import io
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasetrain.hooks.base import HOOKS, Run
from phasetrain.hooks.trackers.base import Record, Tracker
from phasetrain.runtime.storage import LogFile

log = logging.getLogger(__name__)

PLACES = ("updates", "epoch", "phase", "step", "samples")
"""Columns that every table begins with; `at`, in seconds since 1970, is the last one."""


@dataclass
class _Table:
    """A file, its columns of values, and how far a checkpoint covers it.

    Attributes:
        columns: names of values and speeds.
        size: bytes.
        file: None until it is written to in this attempt.
    """

    columns: tuple[str, ...]
    size: int = 0
    file: LogFile | None = None


@HOOKS.register("csv")
class CSV(Tracker):
    """Tables under `csv/` in the run folder: `train-steps.csv`, and one for each split, such as
    `test.csv`.

    A value that appears for the first time when a table has its header begins a new file with one
    more column (`train-steps-2.csv`, ...). A resumed run cuts the files back to what the checkpoint
    covers. Equal runs differ in the columns `samples_per_second` and `at`, which come last.

    Args:
        every_updates: write a train step after each so many updates.
    """

    def __init__(self, every_updates: int = 10) -> None:
        super().__init__(every_updates)
        self._tables: dict[str, _Table] = {}
        self._warned = False

    def on_start(self, run: Run) -> None:
        """Cut off what lies beyond the checkpoint, and take away files that begin beyond it."""
        assert run.folder is not None, "the csv hook needs a run folder"
        storage = run.folder.storage
        root = run.folder.file("csv")
        storage.make_folder(root)
        for name in storage.names(root):
            if name.endswith(".csv") and name not in self._tables:
                storage.remove(f"{root}/{name}")
        for name, table in self._tables.items():
            table.file = run.folder.log(f"csv/{name}")
            if table.file.size < table.size:
                log.warning(
                    "%s is shorter than the checkpoint covers: earlier rows are lost",
                    table.file.path,
                )
                table.size = table.file.read().rfind(b"\n") + 1
            table.file.cut(table.size)
            if not table.size:
                self._append(table, (*PLACES, *table.columns, "at"))

    def write(self, run: Run, record: Record) -> None:
        """Append a row."""
        values = {**record.values, **record.speeds}
        stem = f"{record.split}-steps" if record.kind == "step" else record.split
        table = self._table(run, stem, tuple(values))
        places = [vars(record)[place] for place in PLACES]
        row = [
            *places,
            *(repr(values[name]) if name in values else "" for name in table.columns),
            repr(record.at),
        ]
        self._append(table, row)

    def on_save(self, run: Run) -> None:
        """Hand every row to the system; it is made durable before the checkpoint is."""
        self._flush()

    def close(self) -> None:
        """Hand over what is left."""
        self._flush()

    def state_dict(self) -> dict[str, Any]:
        """Return how far into each file a checkpoint covers, in bytes, and its columns."""
        return {
            "tables": {name: [table.size, *table.columns] for name, table in self._tables.items()}
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint covers; the files are cut at `on_start`."""
        found = state["tables"].items()
        self._tables = {name: _Table(tuple(columns), int(size)) for name, (size, *columns) in found}

    def _table(self, run: Run, stem: str, names: Sequence[str]) -> _Table:
        """Return the latest table of this kind that has columns for these values; begin one if
        there is none."""
        of_stem = re.compile(rf"{re.escape(stem)}(-\d+)?\.csv")
        number = sum(of_stem.fullmatch(name) is not None for name in self._tables)
        latest = self._tables.get(_file_name(stem, number))
        if latest is not None and set(names) <= set(latest.columns):
            return latest
        known = () if latest is None else latest.columns
        more = [name for name in names if name not in known]
        speeds = [name for name in known if name.endswith("per_second")]
        columns = (*(name for name in known if name not in speeds), *more, *speeds)
        assert run.folder is not None
        table = _Table(columns, file=run.folder.log(f"csv/{_file_name(stem, number + 1)}"))
        self._tables[_file_name(stem, number + 1)] = table
        self._append(table, (*PLACES, *columns, "at"))
        return table

    def _append(self, table: _Table, row: Sequence[Any]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(row)
        line = text.getvalue().encode()
        assert table.file is not None
        table.file.write(line)
        table.size += len(line)

    def _flush(self) -> None:
        found = [
            error for table in self._tables.values() if table.file and (error := table.file.flush())
        ]
        if found and not self._warned:
            log.warning(
                "csv/ cannot be written now: %s; rows are kept in memory until it can", found[0]
            )
        self._warned = bool(found)


def _file_name(stem: str, number: int) -> str:
    if number < 2:
        return f"{stem}.csv"
    return f"{stem}-{number}.csv"
