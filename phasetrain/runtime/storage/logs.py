"""Append-only files that can be truncated, and that survive a full disk."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock

log = logging.getLogger(__name__)

BUFFER_BYTES = 8192
"""Bytes that are collected before they are written, unless `flush` is called."""


class LogFile(ABC):
    """Appends to a file; bytes that cannot be written are kept and retried with the next ones.

    Args:
        path: the file, for messages.
        size: current size of the file in bytes.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self._pending = bytearray()
        self._written = size
        self._lock = Lock()
        self._warned = False

    @property
    def size(self) -> int:
        """Size in bytes, including bytes that are still to be written."""
        return self._written + len(self._pending)

    def write(self, data: bytes) -> None:
        """Append `data`; raises nothing, so that logging never ends a run."""
        with self._lock:
            self._pending += data
            if len(self._pending) >= BUFFER_BYTES:
                self._write_pending()

    def flush(self) -> OSError | None:
        """Write everything to the file; return the error if some of it is kept for later."""
        with self._lock:
            return self._write_pending()

    def flush_or_warn(self) -> None:
        """Write everything to the file, or log a warning, once until it can be written again."""
        error = self.flush()
        if error is not None and not self._warned:
            log.warning(
                "%s cannot be written now: %s; new lines are kept in memory until it can",
                self.path,
                error,
            )
        self._warned = error is not None

    def sync(self) -> None:
        """Make everything durable.

        Raises:
            OSError: it could not be written.
        """
        with self._lock:
            if error := self._write_pending():
                raise error
        self._make_durable()  # outside of the lock: other threads can write during the fsync

    def truncate(self, size: int) -> None:
        """Truncate the file to its first `size` bytes."""
        with self._lock:
            self._pending.clear()
            self._truncate_to(size)
            self._written = size

    def truncate_lines(self, covered: int) -> int:
        """Truncate the file to the bytes that a checkpoint covers, and return its size.

        A file that has become shorter is truncated to its last complete line, with a warning.
        """
        if self.size < covered:
            log.warning(
                "%s has %d bytes, the checkpoint covers %d: earlier lines are lost",
                self.path,
                self.size,
                covered,
            )
            # The next line would be appended to a torn one.
            covered = self.read().rfind(b"\n") + 1
        self.truncate(covered)
        return covered

    def close(self) -> None:
        """Write the remaining bytes if possible, and close the file."""
        with self._lock:
            self._write_pending()
            self._close_file()

    @abstractmethod
    def read(self) -> bytes:
        """Return the content of the file."""

    @abstractmethod
    def _append_bytes(self, data: bytes) -> int:
        """Write some of `data` at the end, and return the number of bytes written."""

    @abstractmethod
    def _truncate_to(self, size: int) -> None: ...

    @abstractmethod
    def _make_durable(self) -> None: ...

    @abstractmethod
    def _close_file(self) -> None: ...

    def _write_pending(self) -> OSError | None:
        try:
            while self._pending:
                count = self._append_bytes(bytes(self._pending))
                self._written += count
                del self._pending[:count]
        except OSError as error:
            return error
        return None


class LocalLog(LogFile):
    """A log on this machine's file system.

    Args:
        path: the file; created if need be.
        before: see `Storage`.
    """

    def __init__(self, path: str, before: Callable[[str, str], None]) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._before = before
        super().__init__(path, os.fstat(self._handle).st_size)

    def read(self) -> bytes:
        """Return the content of the file."""
        return os.pread(self._handle, self._written, 0)

    def _append_bytes(self, data: bytes) -> int:
        self._before("append", self.path)
        # At an offset, not O_APPEND: after a failed or short write the next one overwrites the
        # torn rest.
        return os.pwrite(self._handle, data, self._written)

    def _truncate_to(self, size: int) -> None:
        self._before("truncate", self.path)
        os.ftruncate(self._handle, size)

    def _make_durable(self) -> None:
        self._before("fsync", self.path)
        os.fsync(self._handle)

    def _close_file(self) -> None:
        os.close(self._handle)
