"""A phase, and the table of all phases of a plan."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

TRAIN = "train"

AVERAGED = "@"
"""Separates the name of a test split from the name of the averaged weights tested on it, as in
`test@ema`."""


@dataclass(frozen=True)
class Phase:
    """One pass, or a piece of a pass, over one split.

    Attributes:
        index: number of the phase in the plan, from 0.
        split: `train`, or the lower-case key of a test split under DATA; `test@ema` tests averaged
            weights on `test`.
        epoch: pass over the training data that this phase belongs to, from 0; a test has the epoch
            before it.
        first: step within the pass at which the phase begins.
        steps: number of steps in the phase.
        offset: sample within the pass at which the phase begins.
        end: samples of the whole pass.
        batch_size: samples per step, over all processes.
        stage: number of the stage in PHASES.stages; 0 where there are none.
    """

    index: int
    split: str
    epoch: int
    first: int
    steps: int
    offset: int
    end: int
    batch_size: int
    stage: int = 0

    @property
    def data(self) -> str:
        """The split whose samples it takes."""
        return self.split.partition(AVERAGED)[0]

    @property
    def weights(self) -> str:
        """Name of the averaged weights that it tests; empty for those that are trained."""
        return self.split.partition(AVERAGED)[2]

    @property
    def is_train(self) -> bool:
        """Whether the phase trains; all others test."""
        return self.split == TRAIN

    @property
    def samples(self) -> int:
        """Samples of the phase, over all processes."""
        return min(self.steps * self.batch_size, self.end - self.offset)

    @property
    def ends_epoch(self) -> bool:
        """Whether the phase reaches the end of its pass."""
        return self.offset + self.steps * self.batch_size >= self.end

    def samples_in(self, step: int) -> int:
        """Return the samples of step `step` of the phase; only the last of a pass may be short."""
        return min(self.batch_size, self.end - self.offset - step * self.batch_size)


Numbers = NDArray[np.int64]

Column = Literal["split", "epoch", "first", "steps", "offset", "end", "batch_size", "stage"]

# In the order of the fields of Phase; `split` is a position in the names of the table.
COLUMNS: tuple[Column, ...] = (
    *("split", "epoch", "first", "steps"),
    *("offset", "end", "batch_size", "stage"),
)

_read_numbers = attrgetter(*COLUMNS[1:])


class PhaseTable(Sequence[Phase]):
    """The phases of a plan, as a table of numbers from which a `Phase` is made when one is asked
    for.

    A plan may have a million phases, which would take minutes as objects. Code that looks at all of
    them uses `column`, `select` and `kinds` instead of a loop.

    Args:
        phases: the phases in order; their index is replaced by the position in the table.

    Attributes:
        splits: names of the splits, to which the first column refers.
        rows: the numbers of all phases, `(N, 8)`, in the order of COLUMNS.
    """

    def __init__(self, phases: Iterable[Phase] = ()) -> None:
        names: dict[str, int] = {}
        rows = [
            (names.setdefault(phase.split, len(names)), *_read_numbers(phase)) for phase in phases
        ]
        self.splits = tuple(names)
        self.rows: Numbers = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        self._begin = 0
        self._recent: Phase | None = None

    @classmethod
    def from_rows(cls, splits: Sequence[str], rows: Numbers, begin: int = 0) -> "PhaseTable":
        """Return a table of rows `(N, 8)` in the order of COLUMNS.

        Args:
            splits: the names to which the first column refers.
            rows: the numbers; they are not copied.
            begin: index of the first phase.
        """
        table = cls()
        table.splits = tuple(splits)
        table.rows = rows
        table._begin = begin
        return table

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Phase: ...

    @overload
    def __getitem__(self, index: slice) -> "PhaseTable": ...

    def __getitem__(self, index: int | slice) -> "Phase | PhaseTable":
        if isinstance(index, slice):
            begin, _, step = index.indices(len(self))
            assert step == 1, "phases follow one another"
            return self.from_rows(self.splits, self.rows[index], self._begin + begin)
        # Every step of a run asks for the same phase.
        recent = self._recent
        if recent is not None and recent.index - self._begin == index:
            return recent
        split, *numbers = self.rows[index].tolist()
        number = self._begin + index % len(self)
        self._recent = Phase(number, self.splits[split], *numbers)
        return self._recent

    def __add__(self, other: Iterable[Phase]) -> "PhaseTable":
        if not isinstance(other, PhaseTable):
            other = PhaseTable(other)
        return self.join([self, other], self._begin)

    @classmethod
    def join(cls, tables: Sequence["PhaseTable"], begin: int = 0) -> "PhaseTable":
        """Return the phases of several tables, one after the other; `begin` is the first index."""
        splits = tuple(dict.fromkeys(split for table in tables for split in table.splits))
        rows = np.concatenate([table.rows for table in tables])
        # The names of each table have other positions in the joined one.
        rows[:, 0] = np.concatenate(
            [
                np.array(list(map(splits.index, table.splits)), dtype=np.int64)[table.rows[:, 0]]
                for table in tables
            ]
        )
        return cls.from_rows(splits, rows, begin)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PhaseTable | tuple | list):
            return len(self) == len(other) and all(
                phase == another for phase, another in zip(self, other, strict=True)
            )
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: Column) -> Numbers:
        """Return one number of all phases, `(N,)`."""
        return self.rows[:, COLUMNS.index(name)]

    @property
    def is_train(self) -> NDArray[np.bool_]:
        """Which phases train, `(N,)`."""
        if TRAIN not in self.splits:
            return np.zeros(len(self), dtype=np.bool_)
        is_train: NDArray[np.bool_] = self.column("split") == self.splits.index(TRAIN)
        return is_train

    @property
    def samples(self) -> Numbers:
        """Samples of all phases, `(N,)`."""
        counts: Numbers = np.minimum(
            self.column("steps") * self.column("batch_size"),
            self.column("end") - self.column("offset"),
        )
        return counts

    @property
    def ends_epoch(self) -> NDArray[np.bool_]:
        """Which phases reach the end of their pass, `(N,)`."""
        ends = self.column("offset") + self.column("steps") * self.column("batch_size")
        is_last: NDArray[np.bool_] = ends >= self.column("end")
        return is_last

    @cached_property
    def updates_before(self) -> Numbers:
        """Updates of the phases before each phase, and of all phases, `(N + 1,)`."""
        return np.concatenate([[0], np.cumsum(self.column("steps") * self.is_train)])

    def select(self, chosen: NDArray[np.bool_]) -> "PhaseTable":
        """Return the chosen phases, numbered from 0."""
        return self.from_rows(self.splits, self.rows[chosen])

    @cached_property
    def kinds(self) -> tuple[tuple[Phase, int], ...]:
        """The first phase of each kind and the number of phases of that kind, in the order of the
        first ones.

        Phases of a kind differ in their place only: index, epoch, and beginning in the epoch.
        """
        # Phases after a change of the batch size begin at other samples than their steps say.
        skew = self.column("offset") - self.column("first") * self.column("batch_size")
        codes = number_rows(
            *(self.column(name) for name in ("split", "steps", "end", "batch_size", "stage")),
            *(self.samples, skew, self.ends_epoch),
        )
        _, firsts, counts = np.unique(codes, return_index=True, return_counts=True)
        return tuple((self[int(firsts[at])], int(counts[at])) for at in np.argsort(firsts))


def number_rows(*columns: NDArray[np.generic]) -> Numbers:
    """Return a number for each row of some columns, `(N,)`, equal for equal rows only."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        # Most columns of a plan are constant, and sorting a million numbers takes a while.
        if len(column) and (column != column[0]).any():
            values, places = np.unique(column, return_inverse=True)
            # Numbered again after each column, so that the product stays below N squared.
            _, codes = np.unique(codes * len(values) + places, return_inverse=True)
    return codes


class PhaseTableBuilder:
    """Collects the phases of a plan that is being made; some repeat many times."""

    def __init__(self) -> None:
        self._blocks: list[PhaseTable] = [PhaseTable()]
        self._complete = 0  # phases in the blocks
        self._recent: list[Phase] = []

    def __len__(self) -> int:
        return self._complete + len(self._recent)

    def append(self, phase: Phase) -> None:
        """Add a phase."""
        self._recent.append(phase)

    def repeat(self, begin: int, count: int, *, epochs: int, steps: int, samples: int) -> None:
        """Add the phases from number `begin` on `count` times more.

        Args:
            begin: position of the first one.
            count: number of repetitions.
            epochs: epochs by which each repetition is later.
            steps, samples: steps and samples of the epoch by which train phases are later.
        """
        if begin < self._complete:
            pattern = self.build()[begin:]
        else:
            pattern = PhaseTable(self._recent[begin - self._complete :])
        moves = np.zeros_like(pattern.rows)
        moves[:, COLUMNS.index("epoch")] = epochs
        moves[pattern.is_train, COLUMNS.index("first")] = steps
        moves[pattern.is_train, COLUMNS.index("offset")] = samples
        self._flush()
        self._add(PhaseTable.from_rows(pattern.splits, repeat_rows(pattern.rows, moves, count, 1)))

    def build(self) -> PhaseTable:
        """Return the phases so far."""
        self._flush()
        self._blocks = [PhaseTable.join(self._blocks)]
        return self._blocks[0]

    def _flush(self) -> None:
        self._add(PhaseTable(self._recent))
        self._recent = []

    def _add(self, block: PhaseTable) -> None:
        if block:
            self._blocks.append(block)
            self._complete += len(block)


def repeat_rows(rows: Numbers, moves: Numbers, count: int, first: int = 0) -> Numbers:
    """Return `count` copies of some rows, the copy `n` moved `first + n` times."""
    turns = np.arange(first, first + count, dtype=np.int64)[:, None, None]
    repeated: Numbers = (rows + turns * moves).reshape(-1, rows.shape[1])
    return repeated
