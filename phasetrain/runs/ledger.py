"""The ledger of a run: one short binary record per update, in steps.ledger.

A header (magic, version and size of a record, little-endian; from version 2 on the digest of the
initial weights), followed by records of a fixed size in the order of the updates. Equal runs have
equal bytes, however often they were killed.

From version 2 on the records form a hash chain: each ends with a hash over itself and the hash of
the record before it, and the first one over the header. The hash of the last record, the root,
therefore identifies the initial weights and every update.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

FILE = "steps.ledger"
"""Name of the file in a run folder."""

MAGIC = b"PHTLEDGR"
VERSION = 2
"""The version that new runs write; runs that began with version 1 continue with it."""

LINK_BYTES = 16
"""Size of the hash that chains a record to the one before it."""

UNKNOWN_START = bytes(32)
"""Digest of the initial weights in a ledger that does not begin with the first update."""

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
_RECORD_BYTES = {1: _RECORD.size + _CHECK.size, 2: _RECORD.size + LINK_BYTES + _CHECK.size}
HEADER_BYTES = _HEADER.size + len(UNKNOWN_START)
"""Size of the header in the version that new runs write."""

_FIELDS = (
    ("updates", "<u8"),
    *((name, "<u4") for name in ("phase", "step", "samples", "flags")),
    *((name, "<u8") for name in ("ids", "content", "weights")),
    *((name, "<f8") for name in ("loss", "norm", "lr")),
)
# A void type keeps all bytes of a link; numpy's type for bytes would drop zeros at its end.
_LAYOUTS = {
    1: np.dtype([*_FIELDS, ("check", "<u4")]),
    2: np.dtype([*_FIELDS, ("link", f"V{LINK_BYTES}"), ("check", "<u4")]),
}
# The layouts repeat _RECORD field by field, so that numpy reads the whole file in one pass.
assert all(layout.itemsize == _RECORD_BYTES[version] for version, layout in _LAYOUTS.items())

COMPONENTS = ("samples", "batch content", "lr", "loss", "gradient norm", "weights")
"""Components of an update, causes before their effects."""


class InvalidLedgerError(ValueError):
    """The bytes do not begin with the header of a ledger."""


@dataclass(frozen=True)
class LedgerHeader:
    """The header of a ledger.

    Attributes:
        version: 1, or 2 with a hash chain.
        start: SHA-256 of the initial weights, see `phasetrain.models.digest`; UNKNOWN_START in
            version 1, and if the ledger does not begin with the first update.
    """

    version: int = VERSION
    start: bytes = UNKNOWN_START

    @property
    def size(self) -> int:
        """Number of bytes of the header."""
        return _HEADER.size + (len(self.start) if self.is_chained else 0)

    @property
    def record_bytes(self) -> int:
        """Number of bytes of a record."""
        return _RECORD_BYTES[self.version]

    @property
    def is_chained(self) -> bool:
        """Whether the records form a hash chain."""
        return self.version > 1

    @property
    def first_link(self) -> bytes:
        """The hash that takes the role of the record before the first one."""
        return blake2b(self.encode(), digest_size=LINK_BYTES).digest()

    def encode(self) -> bytes:
        """Return the bytes of the header in the file."""
        head = _HEADER.pack(MAGIC, self.version, self.record_bytes)
        return head + self.start if self.is_chained else head

    @classmethod
    def decode(cls, data: bytes, path: str = FILE) -> "LedgerHeader":
        """Read the header at the beginning of a ledger.

        Raises:
            InvalidLedgerError: there is none, or one of a later version.
        """
        for version, size in _RECORD_BYTES.items():
            if data.startswith(_HEADER.pack(MAGIC, version, size)):
                header = cls(version, data[_HEADER.size : HEADER_BYTES])
                if version == 1:
                    return cls(version)
                if len(header.start) == len(UNKNOWN_START):
                    return header
        raise InvalidLedgerError(
            f"{path} does not begin as a ledger of version {VERSION} or earlier does "
            f"({data[: _HEADER.size]!r}); it was damaged, or a later version wrote it"
        )

    def count_records(self, size: int) -> int:
        """Return the number of complete records in a file of `size` bytes."""
        return max(0, size - self.size) // self.record_bytes

    def encode_record(self, record: "LedgerRecord", previous: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of the next record in a ledger with this header, and its link.

        Args:
            record: the record.
            previous: link of the record before it, or `first_link`; not used in version 1, whose
                records have the link b"".
        """
        if self.is_chained:
            return record.encode_linked(previous)
        return record.encode(), b""

    def read_link(self, data: bytes, count: int) -> bytes:
        """Return the hash of the first `count` records of a chained ledger with this content."""
        if not count:
            return self.first_link
        end = self.size + count * self.record_bytes - _CHECK.size
        return data[end - LINK_BYTES : end]


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
        """Return the bytes of the record in a ledger of version 1, with a CRC-32 at the end."""
        # A checksum per record: one flipped bit costs one update, not the rest of the file.
        data = _RECORD.pack(*self)
        return data + _CHECK.pack(crc32(data))

    def encode_linked(self, previous: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of the record in a chained ledger, and its link.

        Args:
            previous: link of the record before it, or `LedgerHeader.first_link`.
        """
        data = _RECORD.pack(*self)
        link = blake2b(previous + data, digest_size=LINK_BYTES).digest()
        data += link
        # The checksum as well: a damaged record breaks the chain at two records, and the checksum
        # tells which of them it is.
        return data + _CHECK.pack(crc32(data)), link

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
        header: its header.
    """

    path: str
    torn: int
    damaged: tuple[int, ...]
    header: LedgerHeader
    _rows: Any = field(repr=False)
    _places: dict[int, int] = field(repr=False)

    def __getitem__(self, updates: int) -> LedgerRecord:
        return LedgerRecord(*self._rows[self._places[updates]].item()[: len(_FIELDS)])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last(self) -> int:
        """The last update, 0 if there is none."""
        return max(self._places, default=0)

    def root_at(self, updates: int) -> str:
        """Return the hash of the chain up to an update, in hex; for 0 updates, over the header.

        Empty if the ledger has no chain, or no such update.
        """
        if not self.header.is_chained:
            return ""
        if not updates:
            return self.header.first_link.hex()
        index = self._places.get(updates)
        return "" if index is None else bytes(self._rows["link"][index]).hex()

    def find_broken_link(self) -> int | None:
        """Return the first update whose hash does not follow from the record before it; None if
        the chain holds, or if there is none."""
        if not self.header.is_chained:
            return None
        previous = self.header.first_link
        content = self._rows.tobytes()
        size = self.header.record_bytes
        for index in range(len(self._rows)):
            begin = index * size
            data = content[begin : begin + _RECORD.size]
            link = content[begin + _RECORD.size : begin + _RECORD.size + LINK_BYTES]
            if blake2b(previous + data, digest_size=LINK_BYTES).digest() != link:
                return int(self._rows["updates"][index])
            previous = link
        return None


def parse_ledger(data: bytes, path: str = FILE) -> Ledger:
    """Parse the content of a ledger.

    Raises:
        InvalidLedgerError: the file has no header that this version can read.
    """
    header = LedgerHeader.decode(data, path)
    table = parse_rows(data, path)
    body = data[header.size :]
    size = header.record_bytes
    # zlib.crc32 takes one buffer at a time, so the checks cannot be vectorized
    checks = [crc32(body[at : at + size - _CHECK.size]) for at in range(0, len(table) * size, size)]
    is_valid = table["check"] == np.array(checks, dtype=np.uint32)
    rows = {int(table["updates"][index]): int(index) for index in np.flatnonzero(is_valid)}
    damaged = tuple(int(index) for index in np.flatnonzero(~is_valid))
    ordered = dict(sorted(rows.items()))
    return Ledger(path, len(body) % size, damaged, header, table, ordered)


def parse_rows(data: bytes, path: str = FILE) -> Any:
    """Return the records of a ledger as an array `(N,)` with the fields of `LedgerRecord`, without
    verifying checksums.

    Raises:
        InvalidLedgerError: the file has no header that this version can read.
    """
    header = LedgerHeader.decode(data, path)
    # An explicit count: a kill may have torn the last record, and frombuffer wants whole ones.
    count = header.count_records(len(data))
    return np.frombuffer(data, _LAYOUTS[header.version], count, offset=header.size)


def count_records(head: bytes, size: int) -> int:
    """Return the number of complete records in a ledger.

    Args:
        head: its first HEADER_BYTES bytes; other content has no records.
        size: size of the file in bytes.
    """
    try:
        return LedgerHeader.decode(head).count_records(size)
    except InvalidLedgerError:
        return 0


def encode_ledger(records: Iterable[LedgerRecord], header: LedgerHeader | None = None) -> bytes:
    """Return the content of a ledger with these records.

    Args:
        records: in the order of updates.
        header: its header; by default of the present version, with unknown initial weights.
    """
    header = header or LedgerHeader()
    parts = [header.encode()]
    link = header.first_link
    for record in records:
        data, link = header.encode_record(record, link)
        parts.append(data)
    return b"".join(parts)
