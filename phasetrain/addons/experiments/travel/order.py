"""The order of the training samples as a table, past and future (`phasetrain order`)."""

import csv
import importlib
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from phasetrain.addons.experiments.fork.sample_updates import PassFinder, find_updates
from phasetrain.addons.experiments.options import OrderOptions
from phasetrain.addons.experiments.travel.past_run import PastRun, open_past_run
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.single_samples import SingleSamples
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms.base import Pipeline
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS
from phasetrain.hooks.ledger_content import hash_bytes
from phasetrain.runs.ledger import NORM
from phasetrain.runtime.format import format_count
from phasetrain.tasks.build.data_builder import build_loader
from phasetrain.tasks.build.loading_builder import find_source_builder

log = logging.getLogger(__name__)

COLUMNS = {
    "update": "number of the update, from 1",
    "place": "place of the sample in the batch of all ranks, from 0",
    "epoch": "epoch, from 0",
    "position": "position in the epoch, from 0",
    "sample": "index in the dataset",
    "source": "label of its dataset in a mixture; null otherwise",
    "seed": "seed of its augmentation, in hex; null with a batch size for each source",
    "excluded": "1 if DATA.TRAIN.exclude leaves it out",
    "past": "1 if the run has made the update",
}
"""Column -> meaning."""

ACCESS = frozenset({"dataset_of", "samples_of"})
"""Methods of the parts of a task by which a hook reaches a dataset."""

UPDATE_COLUMNS = ("update", "loss", "lr", "gradient_norm", "samples", "skipped")
"""Columns of the table `updates` of a query, from the ledger."""

MAX_ROWS = 5_000_000
"""Maximum number of rows that are made at once."""

MAX_SHOWN = 1000
"""Maximum number of rows in the text."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class OrderTable:
    """Rows of the order, by update and place, or of a query.

    Attributes:
        columns: names of the columns.
        rows: the rows; a value that does not exist is None.
        checked: number of updates whose samples were compared with the ledger, up to `wrong`.
        wrong: the first update that has other samples in the ledger; None if there is none. Then
            there are no rows.
        acting: a hook that may change the order, if an update was not compared.
    """

    columns: Sequence[str]
    rows: list[Row]
    checked: int
    wrong: int | None
    acting: str | None = None

    def list_column(self, name: str) -> list[Any]:
        """Return the values of a column."""
        place = list(self.columns).index(name)
        return [row[place] for row in self.rows]

    @property
    def exit_code(self) -> int:
        """0, or 1 if the ledger has other samples for an update, or a hook may change them."""
        return int(self.wrong is not None or self.acting is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the answer for programs."""
        return {**vars(self), "verdict": self.verdict}

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

    def to_text(self) -> str:
        """Return a table for people."""
        if self.wrong is not None:
            return self.verdict
        shown = [self.columns, *self.rows[:MAX_SHOWN]]
        cells = [["" if value is None else str(value) for value in row] for row in shown]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
        if len(self.rows) > MAX_SHOWN:
            lines.append(f"and {len(self.rows) - MAX_SHOWN} more rows; --out FILE.csv has all")
        return "\n".join([*lines, self.verdict])

    def write(self, path: str) -> None:
        """Write the rows to a file.

        Raises:
            ConfigError: it cannot be written (code `order.cannot_write`).
        """
        try:
            if path.endswith(".csv"):
                with Path(path).open("w", encoding="utf-8", newline="") as file:
                    csv.writer(file).writerows([self.columns, *self.rows])
            else:
                arrow: Any = importlib.import_module("pyarrow")
                parquet: Any = importlib.import_module("pyarrow.parquet")
                columns = {name: self.list_column(name) for name in self.columns}
                parquet.write_table(arrow.table(columns), path)
        except OSError as error:
            raise ConfigError(
                f"--out {path}: it cannot be written: {error.strerror or error}; expected a "
                "path in a folder that exists",
                code="order.cannot_write",
            ) from error


class SampleOrder:
    """The order of the training samples of a run: a function of its plan and its seed.

    Args:
        past: the run.

    Attributes:
        updates: number of updates of the run, past and future.

    Raises:
        ConfigError: its samples have no ids (code `order.no_ids`).
    """

    def __init__(self, past: PastRun) -> None:
        self._past = past
        self._plan = past.plan
        self.updates = self._plan.updates
        split = past.data.get(TRAIN)
        is_custom = split is None or split.loader is not None
        if split is None or is_custom or isinstance(split.reader.dataset, ForwardDataset):
            raise ConfigError(
                f"{past.folder.path!r}: DATA.TRAIN is read by a custom loader or a stream, which "
                "chooses the samples itself, so they have no ids, or there is none; use a dataset "
                "with an index",
                code="order.no_ids",
            )
        self._dataset = split.reader.dataset
        context = past.setup.builder().context
        self._sampler: PassFinder = build_loader(context, split, self._plan).sampler
        self._excluded = split.excluded_ids
        self._lengths: Mapping[str, int] | None = getattr(self._dataset, "source_lengths", None)
        self._draws_by_source = find_source_builder(self._dataset) is not None
        # The samples themselves are not read: the keys are a function of the draw alone.
        self._samples = SingleSamples(
            self._dataset, Pipeline(), FieldSelection(), context.seed, "raise"
        )

    def list_updates(self, first: int, last: int) -> OrderTable:
        """Return the samples of a range of updates.

        Raises:
            ConfigError: there are no such updates (code `order.no_such_update`), or they have more
                than MAX_ROWS samples (`order.too_many`).
        """
        if not 1 <= first <= last <= self.updates:
            raise ConfigError(
                f"updates {first} to {last}: the run has {self.updates}; expected a range within 1 "
                f"to {self.updates}",
                code="order.no_such_update",
            )
        return self._make_table(range(first, last + 1))

    def find_sample(self, sample: int) -> OrderTable:
        """Return the updates that have a sample; in constant time per epoch if the order of the
        epoch can be inverted.

        Raises:
            ConfigError: the dataset has no such sample (code `order.no_such_sample`).
        """
        total = len(self._dataset)
        if not 0 <= sample < total:
            raise ConfigError(
                f"--sample {sample}: the dataset has {total} samples; expected 0 to {total - 1}",
                code="order.no_such_sample",
            )
        updates = find_updates(self._plan, self._sampler, np.array([sample], dtype=np.int64))
        # One update of each phase as well: with another order the sample may be in other updates.
        ends = [*np.unique(self._plan.phases.updates_before).tolist()[1:], self.updates]
        return self._make_table(sorted({*updates, *ends}), sample)

    def _make_table(self, updates: Sequence[int], sample: int | None = None) -> OrderTable:
        """Return the rows of some updates, of all their samples or of a single one."""
        ledger = self._past.ledger
        rows: list[Row] = []
        checked = 0
        wrong = None
        for update in updates:
            phase, ordinals, indices = self._find_batch(update)
            is_excluded = np.isin(indices, self._excluded)
            if wrong is None and update in ledger:
                checked += 1
                if hash_bytes(indices[~is_excluded].tobytes()) != ledger[update].ids:
                    wrong = update
            places = np.arange(len(indices))
            if sample is not None:
                places = np.flatnonzero(indices == sample)
            if len(rows) + len(places) > MAX_ROWS:
                raise ConfigError(
                    f"updates {updates[0]} to {updates[-1]}: they have more than {MAX_ROWS} "
                    "samples; choose fewer with --between A B",
                    code="order.too_many",
                )
            positions, chosen = ordinals[places], indices[places]
            rows += zip(
                repeat(update),
                places.tolist(),
                repeat(phase.epoch),
                positions.tolist(),
                chosen.tolist(),
                self._name_sources(chosen),
                self._make_seeds(phase, positions, chosen),
                is_excluded[places].astype(int).tolist(),
                repeat(int(update <= self._past.last)),
                strict=False,
            )
        return OrderTable(tuple(COLUMNS), rows, checked, wrong)

    def _find_batch(self, update: int) -> tuple[Phase, Indices, Indices]:
        """Return the phase of an update, the positions of its samples in the epoch, and the
        samples."""
        phases = self._plan.phases
        index = int(np.searchsorted(phases.updates_before, update, side="left")) - 1
        phase = phases[index]
        begin = phase.offset + (update - 1 - self._plan.updates_before(index)) * phase.batch_size
        end = min(begin + phase.batch_size, phase.offset + phase.samples)
        ordinals = np.arange(begin, end, dtype=np.int64)
        return phase, ordinals, self._sampler.find_pass(phase)[begin:end]

    def _name_sources(self, indices: Indices) -> list[str | None]:
        if self._lengths is None:
            return [None] * len(indices)
        ends = np.cumsum(list(self._lengths.values()))
        labels = list(self._lengths)
        return [labels[place] for place in np.searchsorted(ends, indices, side="right")]

    def _make_seeds(self, phase: Phase, ordinals: Indices, indices: Indices) -> list[str | None]:
        if self._draws_by_source:
            return [None] * len(indices)  # the sources count their samples themselves
        draw = Draw(phase.data, phase.epoch, 0, indices, kept=ordinals)
        return [f"{seed:016x}" for seed in self._samples.make_keys(draw).make_seeds()]


def answer_order(folder: str, options: OrderOptions) -> OrderTable:
    """Answer a question about the order of a run, and write the rows to a file if asked to.

    Args:
        folder: the run folder; it is only read.
        options: the question.

    Raises:
        ConfigError: there is no such update or sample (codes `order.*`), or the query or the file
            is wrong.
    """
    # Before the run is opened, which takes a while.
    suffix = Path(options.out or "rows.csv").suffix
    if suffix != ".csv" and (suffix != ".parquet" or find_spec("pyarrow") is None):
        raise ConfigError(
            f"--out {options.out}: expected FILE.csv, or FILE.parquet if pyarrow is installed",
            code="order.format",
        )
    with open_past_run(folder, trust=options.trust) as past:
        order = SampleOrder(past)
        if options.sample is not None:
            table = order.find_sample(options.sample)
        elif options.update is not None:
            table = order.list_updates(options.update, options.update)
        else:
            table = order.list_updates(*_cut_range(options, order))
        if table.wrong is not None:
            table = replace(table, rows=[])
        elif not table.checked or max(table.list_column("update"), default=0) > past.last:
            table = replace(table, acting=_find_acting_hook(past))
        if options.sql is not None:
            table = _query(options.sql, past, table)
    if options.out is not None:
        table.write(options.out)
    return table


def _cut_range(options: OrderOptions, order: SampleOrder) -> tuple[int, int]:
    first, last = options.between or (1, order.updates)
    if first <= order.updates < last:
        log.info("--between %d %d: the run has %d updates", first, last, order.updates)
        last = order.updates
    return first, last


def _find_acting_hook(past: PastRun) -> str | None:
    """Return the label of a custom hook whose methods ask for a dataset or its samples and that
    does not only observe."""
    for label, section in past.setup.config.HOOKS.items():
        hook_class: Any = HOOKS.find(section.get("name", label), f"HOOKS.{label}.name")
        methods = [value for value in vars(hook_class).values() if isinstance(value, FunctionType)]
        asks = any(ACCESS & {*method.__code__.co_names} for method in methods)
        if asks and not getattr(hook_class, "observe_only", False):
            return str(label)
    return None


def _query(sql: str, past: PastRun, table: OrderTable) -> OrderTable:
    """Return the answer of a query on the tables `samples` and `updates`."""
    tables = {
        "samples": (table.columns, table.rows),
        "updates": (UPDATE_COLUMNS, _list_records(past)),
    }
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            for name, (columns, rows) in tables.items():
                quoted = ", ".join(f'"{column}"' for column in columns)
                connection.execute(f"CREATE TABLE {name} ({quoted})")
                values = ", ".join("?" * len(columns))
                connection.executemany(f"INSERT INTO {name} VALUES ({values})", rows)
            # Without a second database, no statement opens or writes a file.
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            cursor = connection.execute(sql)
            if cursor.description is None:
                raise sqlite3.OperationalError("it returns no rows")
            names = tuple(column[0] for column in cursor.description)
            return replace(table, columns=names, rows=cursor.fetchall())
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ConfigError(
            f"--sql: {error}; expected one SELECT on samples ({', '.join(COLUMNS)}) and updates "
            f"({', '.join(UPDATE_COLUMNS)}); `update` is a keyword of SQL, so write it in double "
            "quotes",
            code="order.invalid_query",
        ) from error


def _list_records(past: PastRun) -> Iterator[Row]:
    for update, record in past.ledger.items():
        norm = record.norm if record.flags & NORM else None
        yield update, record.loss, record.lr, norm, record.samples, int(record.is_skipped)
