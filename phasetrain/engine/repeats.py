"""Encodes the phases of a plan as repetitions, so that its size does not grow with their number.

A plan nearly always repeats a few phases. They are stored once, with the number of repetitions and
the increments of `epoch`, `first` and `offset` of each phase per repetition.
Repetitions may contain repetitions, such as tests within epochs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasetrain.engine.phases import COLUMNS, Column, PhaseTable, number_rows, repeat_rows
from phasetrain.engine.plan import Anchor, Plan

LONGEST_PATTERN = 64
"""Maximum number of phases, or of repetitions, that are recognized as a pattern."""

MOVING: tuple[Column, ...] = ("epoch", "first", "offset")
"""Fields of a phase that advance from one repetition to the next."""

FIXED: tuple[Column, ...] = ("split", "steps", "end", "batch_size", "stage")
"""Fields of a phase that are the same in every repetition."""

Move = tuple[int, ...]


class Item(NamedTuple):
    """A phase, or a repetition of items.

    Attributes:
        at: the values of MOVING of the first phase.
        kind: everything else; equal kinds differ only in `at`.
        content: JSON data of the item if `at` were zero.
    """

    at: Move
    kind: Any
    content: Mapping[str, Any]


def encode_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain JSON data."""
    return {"anchor": list(plan.anchor), "phases": encode_phases(plan.phases)}


def decode_plan(data: Mapping[str, Any]) -> Plan:
    """Return the plan that `encode_plan` has encoded."""
    # Plans of older checkpoints have no third value.
    updates, where, *within = data["anchor"]
    anchor = Anchor(int(updates), float(where), float(within[0] if within else where))
    return Plan(decode_phases(data["phases"]), anchor)


def encode_phases(phases: PhaseTable) -> list[dict[str, Any]]:
    """Return phases as plain JSON data, without their index."""
    kinds = number_rows(*map(phases.column, FIXED))
    moving = [phases.column(name) for name in MOVING]

    def make_item(index: int) -> Item:
        phase = phases[index]
        values = asdict(phase)
        content: dict[str, Any] = {name: values[name] for name in FIXED}
        return Item((phase.epoch, phase.first, phase.offset), int(kinds[index]), content)

    # Phases are folded as a table first: there may be a million of them.
    items = _fold_repetitions(np.stack([kinds, *moving], axis=1), make_item)
    while len(shorter := _fold_items(items)) < len(items):
        items = shorter
    return [_place_item(item) for item in items]


def decode_phases(items: Sequence[Mapping[str, Any]]) -> PhaseTable:
    """Return the phases that `encode_phases` has encoded; also phases with an index, as checkpoints
    of 0.1 have them."""
    splits: dict[str, int] = {}
    blocks = [_expand_item(item, splits) for item in items]
    rows = np.concatenate([PhaseTable().rows, *blocks])
    return PhaseTable.from_rows(tuple(splits), rows)


def _expand_item(item: Mapping[str, Any], splits: dict[str, int]) -> NDArray[np.int64]:
    """Return the rows of a phase or repetition, and add new names to `splits`."""
    if "repeat" not in item:
        split_number = splits.setdefault(item["split"], len(splits))
        numbers = [item.get(name, 0) for name in COLUMNS[1:]]
        return np.array([(split_number, *numbers)], dtype=np.int64)
    patterns = [_expand_item(entry, splits) for entry in item["phases"]]
    moves = [
        np.broadcast_to(_make_row(entry["add"]), pattern.shape)
        for entry, pattern in zip(item["phases"], patterns, strict=True)
    ]
    begin = _make_row([item[name] for name in MOVING])
    return begin + repeat_rows(np.concatenate(patterns), np.concatenate(moves), item["repeat"])


def _make_row(values: Sequence[int]) -> NDArray[np.int64]:
    """Return a row with the values of MOVING and zeros."""
    row = np.zeros(len(COLUMNS), dtype=np.int64)
    row[[COLUMNS.index(name) for name in MOVING]] = values
    return row


def _place_item(item: Item) -> dict[str, Any]:
    return {**item.content, **dict(zip(MOVING, item.at, strict=True))}


def _fold_items(items: Sequence[Item]) -> list[Item]:
    # NumPy cannot tell the width of a table without rows: a run of no epochs has no phases.
    if not items:
        return []
    numbers: dict[Any, int] = {}
    kinds = [numbers.setdefault(item.kind, len(numbers)) for item in items]
    rows = np.array(
        [(kind_number, *item.at) for kind_number, item in zip(kinds, items, strict=True)],
        dtype=np.int64,
    )
    return _fold_repetitions(rows, items.__getitem__)


def _fold_repetitions(rows: NDArray[np.int64], make_item: Callable[[int], Item]) -> list[Item]:
    """Return items with repetitions of up to LONGEST_PATTERN items replaced by one item.

    Args:
        rows: a number for the kind of each item, and the values of MOVING, `(N, 4)`.
        make_item: returns the item of a row.
    """
    folded: list[Item] = []
    begin = 0
    while begin < len(rows):
        length, count = _find_repetition(rows[begin:])
        pattern = [make_item(at) for at in range(begin, begin + length)]
        if count > 1:
            second = range(begin + length, begin + 2 * length)
            following = [make_item(at) for at in second]
            folded.append(_make_repetition(pattern, following, count))
        else:
            folded += pattern
        begin += length * count
    return folded


def _find_repetition(rows: NDArray[np.int64]) -> tuple[int, int]:
    """Return the length of the pattern at the beginning, and how often it occurs, perhaps once."""
    for length in range(1, min(LONGEST_PATTERN, len(rows) // 2) + 1):
        moves = rows[length : 2 * length] - rows[:length]
        if moves[:, 0].any():  # other kinds
            continue
        count = 2
        # In growing blocks: a plan with many short repetitions is not compared to its end each
        # time.
        size = 16
        while True:
            block = rows[count * length : (count + size) * length]
            block = block[: len(block) // length * length]
            before = rows[(count - 1) * length :][: len(block)]
            same = ((block - before).reshape(-1, *moves.shape) == moves).all(axis=(1, 2))
            equal = len(same) if same.all() else int(same.argmin())
            count += equal
            if equal < size:
                break
            size *= 2
        # Two phases that follow one another always differ by some move.
        if count > 2 or length > 1:
            return length, count
    return 1, 1


def _make_repetition(pattern: Sequence[Item], following: Sequence[Item], count: int) -> Item:
    """Return the repetition of a pattern, given its second occurrence."""
    at = pattern[0].at
    kinds = []
    phases = []
    for item, second in zip(pattern, following, strict=True):
        inside = item._replace(at=_subtract(item.at, at))
        add = _subtract(second.at, item.at)
        kinds.append((inside.at, add, item.kind))
        phases.append({**_place_item(inside), "add": list(add)})
    return Item(at, (count, tuple(kinds)), {"repeat": count, "phases": phases})


def _subtract(one: Move, other: Move) -> Move:
    return tuple(a - b for a, b in zip(one, other, strict=True))
