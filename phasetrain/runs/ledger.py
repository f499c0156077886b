"""The ledger of a run: one short binary record per update, in steps.ledger.

A header of 16 bytes (magic, version and size of a record, little-endian) and then records of one
size, in the order in which the updates were made. Equal runs have equal bytes, however often they
were killed.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

FILE = "steps.ledger"
"""Name of the file in a run folder."""

MAGIC = b"PHTLEDGR"
VERSION = 1
SKIPPED = 1
NORM = 2
SAMPLED = 4
FULL = 8
PIECES = 16
"""Flags: the update was skipped; the gradient's norm is there; a part of the content is hashed; all
of it is; weights are those pieces that the main process has. The upper half holds the number of
processes where there are several."""

PROCESSES_SHIFT = 16

_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<QIIIIQQQddd")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
HEADER = _HEADER.pack(MAGIC, VERSION, RECORD_BYTES)

_LAYOUT = np.dtype(
    [
        *(
            (name, "<u8" if name == "updates" else "<u4")
            for name in ("updates", "phase", "step", "samples", "flags")
        ),
        *((name, "<u8") for name in ("ids", "content", "weights")),
        *((name, "<f8") for name in ("loss", "norm", "lr")),
        ("check", "<u4"),
    ]
)
assert _LAYOUT.itemsize == RECORD_BYTES

COMPONENTS = ("samples", "batch content", "lr", "loss", "gradient norm", "weights")
"""What a record tells of an update, in the order of cause and effect within it."""


class InvalidLedgerError(ValueError):
    """The bytes are no ledger."""


@dataclass(frozen=True)
class Record:
    """One update.

    Attributes:
        updates: its number, as in metrics.jsonl: the first is 1.
        phase: index of its phase in the plan.
        step: its number in the phase; the first is 1.
        samples: samples of the update.
        flags: see SKIPPED, NORM, SAMPLED and FULL.
        ids: digest of the indices of its samples, in their order.
        content: digest of what its batches hold: of a part under SAMPLED, of all under FULL, else
            0.
        weights: digest of some entries of one or two parameters after the update; which ones
            changes with `updates`.
        loss: mean over its samples; the exact value, as float64.
        norm: Euclidean norm of the gradient before clipping, where NORM says that it was computed,
            else 0.
        lr: learning rate of the first parameter group.
    """

    updates: int
    phase: int
    step: int
    samples: int
    flags: int
    ids: int
    content: int
    weights: int
    loss: float
    norm: float
    lr: float

    def encode(self) -> bytes:
        """Return the record as it stands in the file, with its CRC-32 at the end."""
        return encoded(*astuple(self))

    @property
    def processes(self) -> int:
        """How many processes have made the update."""
        return self.flags >> PROCESSES_SHIFT or 1

    @property
    def skipped(self) -> bool:
        """Whether the update was left out because it was not finite."""
        return bool(self.flags & SKIPPED)

    def told(self, component: str) -> str | None:
        """Return a component as text, exact to the bit; None where the record does not tell it."""
        flags = self.flags
        if component == "samples":
            return f"{self.samples} samples, {self.ids:016x}"
        if component == "batch content":
            kind = "all" if flags & FULL else "a part"
            if flags & (SAMPLED | FULL):
                return f"{self.content:016x} of {kind}"
            return None
        if component == "lr":
            return repr(self.lr)
        if component == "loss":
            return repr(self.loss)
        if component == "gradient norm":
            if flags & NORM:
                return repr(self.norm)
            return "not computed"
        return f"{self.weights:016x}{' skipped' if self.skipped else ''}"


def encoded(*values: float) -> bytes:
    """Return a record, given the attributes of `Record` in their order, as it stands in the
    file."""
    data = _RECORD.pack(*values)
    return data + _CHECK.pack(crc32(data))


def different(one: Record, other: Record) -> list[str]:
    """Return the components in which two records of the same update differ, in the order of
    COMPONENTS.

    Numbers are compared by their bits. What is hashed of content and weights has to be the same
    kind on both sides: that of the content depends on the number of processes, and that of weights
    in pieces too.
    """
    if one.encode() == other.encode():
        return []
    return [name for name in COMPONENTS if _differ(one, other, name)]


def _differ(one: Record, other: Record, component: str) -> bool:
    return comparable(one, other, component) and one.told(component) != other.told(component)


def comparable(one: Record, other: Record, component: str) -> bool:
    """Tell whether what two records have of a component is of the same kind."""
    kinds = SAMPLED | FULL
    shared = one.processes == other.processes
    if component == "batch content":
        return shared and one.flags & kinds == other.flags & kinds
    if component == "weights" and (one.flags | other.flags) & PIECES:
        return shared and bool(one.flags & other.flags & PIECES)
    return True


@dataclass(frozen=True)
class Ledger(Mapping[int, Record]):
    """The content of a ledger: update -> record, in the order of updates.

    Attributes:
        path: where it was read, for messages.
        torn: bytes at the end that are no whole record; a kill leaves them, and a resume cuts them
            off.
        damaged: positions of records, from 0, whose check does not fit; they are left out.
    """

    path: str
    torn: int
    damaged: tuple[int, ...]
    _rows: Any = field(repr=False)
    _places: dict[int, int] = field(repr=False)

    def __getitem__(self, updates: int) -> Record:
        return Record(*self._rows[self._places[updates]].item()[:-1])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last(self) -> int:
        """The last update, 0 where there is none."""
        return max(self._places, default=0)


def read(data: bytes, path: str = FILE) -> Ledger:
    """Return the ledger in `data`.

    Raises:
        InvalidLedgerError: it does not begin as a ledger of this version.
    """
    table = rows(data, path)
    body = data[len(HEADER) :]
    checks = [
        crc32(body[at : at + _RECORD.size])
        for at in range(0, len(table) * RECORD_BYTES, RECORD_BYTES)
    ]
    whole = table["check"] == np.array(checks, dtype=np.uint32)
    places = {int(table["updates"][place]): int(place) for place in np.flatnonzero(whole)}
    damaged = tuple(int(place) for place in np.flatnonzero(~whole))
    return Ledger(path, len(body) % RECORD_BYTES, damaged, table, dict(sorted(places.items())))


def rows(data: bytes, path: str = FILE) -> Any:
    """Return the records as they stand in the file, unchecked: an array `(N,)` with the fields of
    `Record`.

    Raises:
        InvalidLedgerError: it does not begin as a ledger of this version.
    """
    begin = data[: len(HEADER)]
    if begin != HEADER:
        raise InvalidLedgerError(
            f"{path} does not begin as a ledger of version {VERSION} does ({begin!r}); it was damaged, or another "
            "version wrote it"
        )
    return np.frombuffer(
        data, _LAYOUT, (len(data) - len(HEADER)) // RECORD_BYTES, offset=len(HEADER)
    )


def recorded(size: int) -> int:
    """Return how many records a file of `size` bytes holds."""
    return max(0, size - len(HEADER)) // RECORD_BYTES


def written(records: Iterable[Record]) -> bytes:
    """Return a whole ledger with these records."""
    return HEADER + b"".join(record.encode() for record in records)
