"""What a run has measured, as a table: the lines of metrics.jsonl, scalars by name, smoothed by
fvcore."""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.storage import Storage, open_storage

if TYPE_CHECKING:
    from fvcore.common.history_buffer import HistoryBuffer

FILE = "metrics.jsonl"

SMALLER = ("loss", "error", "perplexity", "mae", "mse", "rmse")
"""Last words of names of metrics of which smaller values are better."""

_MONITOR = re.compile(
    r"^CHECKPOINT:\n(?:  .*\n)*?  best:\n(?:    .*\n)*?    monitor: (\S+)", re.MULTILINE
)

How = Literal["median", "mean"]


@dataclass(frozen=True)
class Best:
    """The best value of a metric in a run.

    Attributes:
        metric: such as `test/accuracy`.
        value: the best one.
        epoch: in which it was measured, from 0.
        updates: done before it was measured.
        checkpoint: path of the checkpoint that has these weights; empty where none is kept.
    """

    metric: str
    value: float
    epoch: int
    updates: int
    checkpoint: str = ""


class History(Sequence[dict[str, Any]]):
    """The lines of metrics.jsonl as a table, in their order.

    A row is a flat mapping. A logged step has `kind` "step", `updates`, `epoch`, `split`, `loss`,
    `lr` and the values that a loss logs as `logs/NAME`; a phase has `kind` "phase" and its metrics
    as `SPLIT/NAME`, such as `test/accuracy`. What may differ between equal runs is under
    `time/NAME`.

    Args:
        rows: of the table.
    """

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    def __getitem__(self, index: int | slice) -> "dict[str, Any] | History":
        if isinstance(index, slice):
            return History(self._rows[index])
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        steps = sum(row["kind"] == "step" for row in self)
        return f"History of {steps} steps and {len(self) - steps} other rows; scalars: {', '.join(self.names)}"

    @property
    def names(self) -> list[str]:
        """Names of all scalars but counts, in the order in which they appear first."""
        return list(
            dict.fromkeys(
                name for row in self for name, value in row.items() if _is_scalar(name, value)
            )
        )

    def scalar(self, name: str) -> list[tuple[int, float]]:
        """Return (updates, value) of each row that has a scalar, such as `loss`, `lr` or
        `test/accuracy`.

        Raises:
            ConfigError: there is no such scalar; near misses are named.
        """
        found = [
            (int(row["updates"]), float(row[name]))
            for row in self
            if _is_scalar(name, row.get(name))
        ]
        if not found:
            near = did_you_mean(name, self.names) or "."
            raise ConfigError(
                f"{name!r}: the run has no such scalar{near} Known: {', '.join(self.names) or 'none'}"
            )
        return found

    def buffer(self, name: str) -> "HistoryBuffer":
        """Return a scalar as fvcore's `HistoryBuffer`, whose iterations are updates.

        Example:
            >>> history.buffer("loss").median(20)
        """
        from fvcore.common.history_buffer import HistoryBuffer

        values = self.scalar(name)
        found = HistoryBuffer(max_length=len(values) + 1)
        for updates, value in values:
            found.update(value, updates)
        return found

    def smoothed(self, name: str, window: int = 20, how: How = "median") -> list[tuple[int, float]]:
        """Return (updates, value) of a scalar, each value that of fvcore's `HistoryBuffer` at that
        time.

        Args:
            name: of the scalar.
            window: so many values up to this one are looked at, at least 1.
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
        found = []
        for updates, value in self.scalar(name):
            buffer.update(value, updates)
            found.append(
                (updates, float(buffer.median(window) if how == "median" else buffer.avg(window)))
            )
        return found

    @property
    def last(self) -> dict[str, float]:
        """The latest value of every metric of a phase, by `split/name`."""
        return {
            name: value for row in self if row["kind"] == "phase" for name, value in _metrics(row)
        }

    def best(self, monitor: str | None = None) -> Best | None:
        """Return the best value of a metric; None where it was never measured.

        Args:
            monitor: such as `test/accuracy`, or `-test/loss` where smaller is better; by default
                the first metric of a test, else of training. The name tells then which values are
                better.
        """
        name = monitor or self.first_metric()
        metric = name.removeprefix("-")
        phases = [
            row for row in self if row["kind"] == "phase" and _is_scalar(metric, row.get(metric))
        ]
        found = [row for row in phases if math.isfinite(row[metric])]
        if not found:
            return None
        row = (min if name.startswith("-") else max)(found, key=lambda one: one[metric])
        epoch = row.get("epoch")
        return Best(
            metric, row[metric], epoch if isinstance(epoch, int) else 0, int(row["updates"])
        )

    def first_metric(self) -> str:
        """Return the first metric of a test, else of training, with a minus sign where its name
        says smaller is better.

        Empty where nothing was measured.
        """
        names = [name for row in self if row["kind"] == "phase" for name, _ in _metrics(row)]
        name = next(
            (one for one in names if not one.startswith("train/")), names[0] if names else ""
        )
        if smaller_is_better(name):
            return f"-{name}"
        return name

    def frame(self) -> Any:
        """Return the table as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError(
                f"history.frame() needs pandas, which cannot be imported ({error}); install it with `pip install "
                "pandas`, or take the rows as they are: a list of mappings"
            ) from error
        return pd.DataFrame.from_records(self._rows)


def read_history(folder: str | Path) -> History:
    """Return what the run in a folder has measured so far; empty where it has not measured
    anything.

    Lines that a kill has torn, and lines of unknown form, are left out.
    """
    storage = open_storage(str(folder))
    return History(list(rows_of(_content(storage, f"{str(folder).rstrip('/')}/{FILE}"))))


def monitor_of(folder: str | Path) -> str | None:
    """Return CHECKPOINT.best.monitor of the run in a folder; None where none is set."""
    content = _content(open_storage(str(folder)), f"{str(folder).rstrip('/')}/config.yaml")
    found = _MONITOR.search(content.decode(errors="replace"))
    if found and found[1] not in ("null", "auto"):
        return found[1].strip("'\"")
    return None


def rows_of(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows of a piece of metrics.jsonl."""
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(record, dict)
            and isinstance(record.get("updates"), int)
            and isinstance(record.get("kind"), str)
        ):
            yield _flat(record)


def smaller_is_better(name: str) -> bool:
    """Tell from the name of a metric whether smaller values of it are better."""
    return name.replace("/", "_").rpartition("_")[2] in SMALLER


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in record.items():
        if key == "metrics" and isinstance(value, dict):
            row |= {f"{record.get('split')}/{name}": _number(one) for name, one in value.items()}
        elif isinstance(value, dict):
            row |= {f"{key}/{name}": _number(one) for name, one in value.items()}
        else:
            row[key] = _number(value) if key in ("loss", "lr") else value
    return row


def _number(value: Any) -> Any:
    """Return a number that JSON cannot hold, and that stands there as text, as a number."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value


def _is_scalar(name: str, value: Any) -> bool:
    if name in ("updates", "phase", "epoch", "step", "samples") or isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    split = f"{row.get('split')}/"
    yield from (
        (name, value)
        for name, value in row.items()
        if name.startswith(split) and _is_scalar(name, value)
    )


def _content(storage: Storage, path: str) -> bytes:
    try:
        return storage.read(path)
    except OSError:
        return b""
