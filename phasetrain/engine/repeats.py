"""Encodes the phases of a plan as repetitions, so that its size does not grow with their number.

A plan is nearly always a few phases over and over again. They are stored once, with the number of
repetitions and what each repetition adds to `epoch`, `first` and `offset` of each phase.
Repetitions may contain repetitions, such as tests within epochs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasetrain.engine.plan import Anchor, Phase, Plan

LONGEST_PATTERN = 64
"""Maximum number of phases, or of repetitions, that are recognized as a pattern."""

MOVING = ("epoch", "first", "offset")
"""Fields of a phase that advance from one repetition to the next."""

FIXED = ("split", "steps", "end", "batch_size", "stage")
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
    return Plan(tuple(decode_phases(data["phases"])), anchor)


def encode_phases(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Return phases as plain JSON data, without their index."""
    contents: dict[Any, dict[str, Any]] = {}
    items = []
    for phase in phases:
        kind = (phase.split, phase.steps, phase.end, phase.batch_size, phase.stage)
        # One mapping for all phases of a kind: there may be a million phases.
        if kind not in contents:
            contents[kind] = dict(zip(FIXED, kind, strict=True))
        items.append(Item((phase.epoch, phase.first, phase.offset), kind, contents[kind]))
    while len(shorter := _fold_repetitions(items)) < len(items):
        items = shorter
    return [_place_item(item) for item in items]


def decode_phases(items: Sequence[Mapping[str, Any]]) -> Iterator[Phase]:
    """Yield the phases that `encode_phases` has encoded, numbered; also phases with an index, as
    checkpoints of 0.1 have them."""
    for index, (fixed, epoch, first, offset) in enumerate(_expand_items(items)):
        split, steps, end, batch_size, stage = fixed
        yield Phase(index, split, epoch, first, steps, offset, end, batch_size, stage)


def _expand_items(items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, int, int, int]]:
    """Yield the values of FIXED and MOVING of each phase."""
    for item in items:
        at = [item[name] for name in MOVING]
        if "repeat" not in item:
            stage = item.get("stage", 0)
            fixed = (item["split"], item["steps"], item["end"], item["batch_size"], stage)
            yield fixed, *at
            continue
        pattern = [(list(_expand_items([one])), one["add"]) for one in item["phases"]]
        for turn in range(item["repeat"]):
            for phases, add in pattern:
                epochs, firsts, offsets = (a + b * turn for a, b in zip(at, add, strict=True))
                for fixed, epoch, first, offset in phases:
                    yield fixed, epoch + epochs, first + firsts, offset + offsets


def _place_item(item: Item) -> dict[str, Any]:
    return {**item.content, **dict(zip(MOVING, item.at, strict=True))}


def _fold_repetitions(items: Sequence[Item]) -> list[Item]:
    """Return items with repetitions of up to LONGEST_PATTERN items replaced by one item."""
    # NumPy cannot tell the width of a table without rows: a run of no epochs has no phases.
    if not items:
        return []
    numbers: dict[Any, int] = {}
    kinds = [numbers.setdefault(item.kind, len(numbers)) for item in items]
    rows = np.array(
        [(kind, *item.at) for kind, item in zip(kinds, items, strict=True)], dtype=np.int64
    ).reshape(len(items), -1)
    found: list[Item] = []
    begin = 0
    while begin < len(items):
        length, count = _find_repetition(rows[begin:])
        pattern = items[begin : begin + length]
        if count > 1:
            following = items[begin + length : begin + 2 * length]
            found.append(_make_repetition(pattern, following, count))
        else:
            found += pattern
        begin += length * count
    return found


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
