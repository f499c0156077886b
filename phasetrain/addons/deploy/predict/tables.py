"""Reads rows of a table as samples, by the names of the columns if the dataset has any."""

import csv
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from phasetrain.errors import ConfigError, did_you_mean

log = logging.getLogger(__name__)

Row = Sequence[str]


def read_rows(lines: Iterable[str], name: str, columns: Sequence[str]) -> list[Tensor]:
    """Return the rows of a table as float32 tensors.

    The first row is a header if none of its cells is a number, or if it names columns of the run.
    With names of the run, a header selects the columns and their order; without a header, or
    without these names, columns are taken as they come.

    Args:
        lines: of a CSV file.
        name: of the file, for messages.
        columns: name of each input column in the run; empty if they are not known.

    Raises:
        ConfigError: the header lacks a column of the run, or has one twice.
        ValueError: a cell is empty or not a number, rows differ in length, or there is a header
            alone; names the line.
    """
    rows = [(number, row) for number, row in enumerate(csv.reader(lines), 1) if row]
    if not rows:
        return []
    _, first = rows[0]
    names = [cell.strip() for cell in first]
    if not _is_header(names, columns):
        names = [f"column {number}" for number in range(1, len(first) + 1)]
        positions: Sequence[int] = range(len(first))
    else:
        rows = rows[1:]
        if not rows:
            raise ValueError(
                f"its only line {','.join(first)!r} is taken for a header; expected a line per "
                "sample, numbers with commas between them"
            )
        positions = _select_columns(names, name, columns)
    return [_parse_row(number, row, names, positions) for number, row in rows]


def _is_header(cells: Row, columns: Sequence[str]) -> bool:
    named = set(columns) & set(cells)
    # Names may be numbers, such as those that pandas gives.
    if columns and (named == set(columns) or not all(map(_is_number, named))):
        return True
    return any(cells) and not any(map(_is_number, cells))


def _select_columns(names: Sequence[str], name: str, columns: Sequence[str]) -> Sequence[int]:
    """Return the position of each column of the run in a header."""
    if not columns:
        log.warning(
            "%s: the names of its columns are not compared, because the dataset of the run reports "
            "no input_columns; they are taken in their order: %s",
            name,
            ", ".join(names),
        )
        return range(len(names))
    for column in columns:
        if names.count(column) != 1:
            near = did_you_mean(column, names) or "."
            reason = "has no column" if column not in names else "has more than one column"
            raise ConfigError(
                f"{name}: its header {reason} {column!r}{near} Expected the columns of the run, in "
                f"any order: {', '.join(columns)}; correct the header, or remove it to take the "
                "columns in this order",
                code="predict.wrong_columns",
            )
    ignored = [other for other in names if other not in columns]
    if ignored:
        log.warning(
            "%s: columns that are no input of the run are ignored: %s", name, ", ".join(ignored)
        )
    return [names.index(column) for column in columns]


def _parse_row(number: int, row: Row, names: Sequence[str], positions: Sequence[int]) -> Tensor:
    if len(row) != len(names):
        raise ValueError(f"line {number} has {len(row)} values, the first one {len(names)}")
    values = []
    for position in positions:
        cell = row[position].strip()
        if not cell:
            raise ValueError(
                f"line {number}: {names[position]!r} is empty, and the run does not say what a "
                "missing value is; fill it as in the training data, with nan if its transforms "
                "replace that"
            )
        try:
            values.append(float(cell))
        except ValueError:
            raise ValueError(
                f"line {number}: {names[position]!r} is {cell!r}, expected a number"
            ) from None
    return torch.tensor(values)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
