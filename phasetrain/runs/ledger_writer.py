"""Appends to the ledger of a run, and continues it after a resume."""

import logging
from collections.abc import Iterable
from contextlib import suppress

from phasetrain.runs.ledger import (
    UNKNOWN_START,
    InvalidLedgerError,
    LedgerHeader,
    LedgerRecord,
)
from phasetrain.runtime.storage import LogFile

log = logging.getLogger(__name__)


class LedgerWriter:
    """Appends records to a ledger, after it was truncated to the records of the checkpoint.

    Args:
        file: the ledger.
        covered: number of records that the checkpoint covers; all later ones are cut off.
        start: digest of the initial weights, for the header of a ledger that begins.

    Attributes:
        records: number of records of the ledger.
    """

    def __init__(self, file: LogFile, covered: int, start: bytes = UNKNOWN_START) -> None:
        self.records = 0
        self._file = file
        data = file.read() if covered and file.size else b""
        header = None
        with suppress(InvalidLedgerError):
            header = LedgerHeader.decode(data)
        complete = header.count_records(len(data)) if header else 0
        if complete < covered:
            content = f"{complete} records" if header else "no header that this version can read"
            log.warning(
                "%s has %s, and the checkpoint covers %d: earlier records are lost",
                file.path,
                content,
                covered,
            )
        if header is None:
            # A run that begins has the header of this version, whatever an attempt without a
            # checkpoint has left; a run that continues keeps its version.
            self._header = LedgerHeader(start=start)
            self._link = self._header.first_link
            file.truncate(0)
            file.write(self._header.encode())
            return
        self._header = header
        self.records = min(covered, complete)
        # This also cuts off a record that a kill has left torn.
        file.truncate(header.size + self.records * header.record_bytes)
        self._link = header.read_link(data, self.records) if header.is_chained else b""

    @property
    def root(self) -> str:
        """Hash of the chain up to the last record, in hex; empty in a ledger of version 1."""
        return self._link.hex() if self._header.is_chained else ""

    def write(self, records: Iterable[LedgerRecord]) -> None:
        """Append records; a file system that fails is warned of, and the next write tries again."""
        lines = []
        for record in records:
            line, self._link = self._header.encode_record(record, self._link)
            lines.append(line)
        self._file.write(b"".join(lines))
        self.records += len(lines)
        self._file.flush_or_warn()
