"""The ledger of a run: one short binary record per update, in steps.ledger.

A header of 16 bytes (magic, version and size of a record, little-endian), followed by records of a
fixed size in the order of the updates. Equal runs have equal bytes, however often they were
killed.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
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
SHARDED_WEIGHTS = 16
"""Flags: the update was skipped; the norm of the gradient was computed; a part of the batch content
is hashed; all of it is; the weights are the shards of rank 0."""

PROCESSES_SHIFT = 16
"""Bits by which the world size is shifted in the flags; 0 stands for 1."""

# "<" on every machine: runs are compared byte by byte across machines, and without it struct would
# also pad the fields as the C compiler of the machine does.
_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<QIIIIQQQddd")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
HEADER = _HEADER.pack(MAGIC, VERSION, RECORD_BYTES)

_LAYOUT = np.dtype(
    [
        ("updates", "<u8"),
        *((name, "<u4") for name in ("phase", "step", "samples", "flags")),
        *((name, "<u8") for name in ("ids", "content", "weights")),
        *((name, "<f8") for name in ("loss", "norm", "lr")),
        ("check", "<u4"),
    ]
)
# The layout repeats _RECORD field by field, so that numpy reads the whole file in one pass.
assert _LAYOUT.itemsize == RECORD_BYTES

COMPONENTS = ("samples", "batch content", "lr", "loss", "gradient norm", "weights")
"""Components of an update, causes before their effects."""


class InvalidLedgerError(ValueError):
    """The bytes do not begin with the header of a ledger."""


# A tuple rather than a dataclass, because one is made, changed and packed at every update.
class LedgerRecord(NamedTuple):
    """One update.

    Attributes:
        updates: number of the update, from 1, as in metrics.jsonl.
        phase: index of its phase in the plan.
        step: number of the step in the phase, from 1.
        samples: number of samples of the update.
        flags: see SKIPPED, NORM, SAMPLED, FULL and SHARDED_WEIGHTS; the world size is in the upper
            half.
        ids: digest of the indices of its samples, in their order.
        content: digest of its batches: of a part with SAMPLED, of all with FULL, else 0.
        weights: digest of some entries of one or two parameters after the update, others at each
            update.
        loss: mean over its samples; the exact value, as float64.
        norm: Euclidean norm of the gradient before clipping with NORM, else 0.
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
        """Return the bytes of the record in the file, with a CRC-32 at the end."""
        # A checksum per record: one flipped bit costs one update, not the rest of the file.
        data = _RECORD.pack(*self)
        return data + _CHECK.pack(crc32(data))

    @property
    def processes(self) -> int:
        """World size of the update."""
        return self.flags >> PROCESSES_SHIFT or 1

    @property
    def is_skipped(self) -> bool:
        """Whether the update was skipped because it was not finite."""
        return bool(self.flags & SKIPPED)

    def format_component(self, component: str) -> str | None:
        """Return a component as text, exact to the bit; None if the record does not have it."""
        if component == "samples":
            return f"{self.samples} samples, {self.ids:016x}"
        if component == "batch content":
            if self.flags & FULL:
                return f"{self.content:016x} of all"
            if self.flags & SAMPLED:
                return f"{self.content:016x} of a part"
            return None
        if component == "lr":
            return repr(self.lr)  # repr of a float is exact
        if component == "loss":
            return repr(self.loss)
        if component == "gradient norm":
            # the field is 0.0 without the flag, which is also a norm
            if self.flags & NORM:
                return repr(self.norm)
            return "not computed"
        # A skipped update leaves the weights as they are, so their digest does not show it.
        if self.is_skipped:
            return f"{self.weights:016x} skipped"
        return f"{self.weights:016x}"


def list_differences(one: LedgerRecord, other: LedgerRecord) -> list[str]:
    """Return the components in which two records of the same update differ, in the order of
    COMPONENTS.

    Numbers are compared by their bits: NaN equals NaN, and 0.0 differs from -0.0. Digests are
    compared only if both runs have hashed the same, see `is_comparable`.
    """
    # Bytes and texts, not floats: `==` would separate NaN from NaN and miss the sign of a zero.
    if one.encode() == other.encode():
        return []
    return [
        name
        for name in COMPONENTS
        if is_comparable(one, other, name)
        and one.format_component(name) != other.format_component(name)
    ]


def is_comparable(one: LedgerRecord, other: LedgerRecord, component: str) -> bool:
    """Return whether a component of two records was computed in the same way.

    The digest of the content depends on the world size, and so does the digest of sharded weights.
    """
    kinds = SAMPLED | FULL
    has_equal_size = one.processes == other.processes
    if component == "batch content":
        return has_equal_size and one.flags & kinds == other.flags & kinds
    if component == "weights" and (one.flags | other.flags) & SHARDED_WEIGHTS:
        return has_equal_size and bool(one.flags & other.flags & SHARDED_WEIGHTS)
    return True


@dataclass(frozen=True)
class Ledger(Mapping[int, LedgerRecord]):
    """The content of a ledger: update -> record, in the order of updates.

    Attributes:
        path: path of the file, for messages.
        torn: bytes of an incomplete record at the end; a kill leaves them, and a resume cuts them
            off.
        damaged: positions of records, from 0, with a wrong checksum; they are skipped.
    """

    path: str
    torn: int
    damaged: tuple[int, ...]
    _rows: Any = field(repr=False)
    _places: dict[int, int] = field(repr=False)

    def __getitem__(self, updates: int) -> LedgerRecord:
        return LedgerRecord(*self._rows[self._places[updates]].item()[:-1])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last(self) -> int:
        """The last update, 0 if there is none."""
        return max(self._places, default=0)


def parse_ledger(data: bytes, path: str = FILE) -> Ledger:
    """Parse the content of a ledger.

    Raises:
        InvalidLedgerError: the file has no header of this version.
    """
    table = parse_rows(data, path)
    body = data[len(HEADER) :]
    # zlib.crc32 takes one buffer at a time, so the checks cannot be vectorized
    checks = [
        crc32(body[at : at + _RECORD.size])
        for at in range(0, len(table) * RECORD_BYTES, RECORD_BYTES)
    ]
    is_valid = table["check"] == np.array(checks, dtype=np.uint32)
    places = {int(table["updates"][place]): int(place) for place in np.flatnonzero(is_valid)}
    damaged = tuple(int(place) for place in np.flatnonzero(~is_valid))
    return Ledger(path, len(body) % RECORD_BYTES, damaged, table, dict(sorted(places.items())))


def parse_rows(data: bytes, path: str = FILE) -> Any:
    """Return the records of a ledger as an array `(N,)` with the fields of `LedgerRecord`, without
    verifying checksums.

    Raises:
        InvalidLedgerError: the file has no header of this version.
    """
    begin = data[: len(HEADER)]
    if begin != HEADER:
        raise InvalidLedgerError(
            f"{path} does not begin as a ledger of version {VERSION} does ({begin!r}); it was "
            "damaged, or another version wrote it"
        )
    # An explicit count: a kill may have torn the last record, and frombuffer wants whole ones.
    return np.frombuffer(
        data, _LAYOUT, (len(data) - len(HEADER)) // RECORD_BYTES, offset=len(HEADER)
    )


def count_records(size: int) -> int:
    """Return the number of complete records in a file of `size` bytes."""
    return max(0, size - len(HEADER)) // RECORD_BYTES


def encode_ledger(records: Iterable[LedgerRecord]) -> bytes:
    """Return the content of a ledger with these records."""
    return HEADER + b"".join(record.encode() for record in records)
