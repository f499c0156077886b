"""Files that grow by appending and can be cut back, and that wait for room where a disk is full."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock

AT_LEAST = 8192
"""Bytes that are collected before they are handed to the system, unless somebody asks for it."""


class LogFile(ABC):
    """Bytes appended to a file. What cannot be written now is kept and tried again with what comes
    after it.

    Args:
        path: the file, for messages.
        size: its bytes.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self._pending = bytearray()
        self._written = size
        self._guard = Lock()

    @property
    def size(self) -> int:
        """Bytes of the file, those included that are still to be written."""
        return self._written + len(self._pending)

    def write(self, data: bytes) -> None:
        """Append `data`; raises nothing."""
        with self._guard:
            self._pending += data
            if len(self._pending) >= AT_LEAST:
                self._hand_over()

    def flush(self) -> OSError | None:
        """Hand everything to the system; return the error where it refused and the rest is kept for
        later."""
        with self._guard:
            return self._hand_over()

    def sync(self) -> None:
        """Make everything durable.

        Raises:
            OSError: it could not be written.
        """
        with self._guard:
            if error := self._hand_over():
                raise error
        self._make_durable()  # beside the guard: whoever writes need not wait for the disk

    def truncate(self, size: int) -> None:
        """Cut the file back to its first `size` bytes."""
        with self._guard:
            self._pending.clear()
            self._truncate_to(size)
            self._written = size

    def close(self) -> None:
        """Write what is left, as far as that is possible, and release the file."""
        with self._guard:
            self._hand_over()
            self._close_file()

    @abstractmethod
    def read(self) -> bytes:
        """Return the content of the file."""

    @abstractmethod
    def _append_bytes(self, data: bytes) -> int:
        """Write some of `data` at the end and return how many bytes that were."""

    @abstractmethod
    def _truncate_to(self, size: int) -> None: ...

    @abstractmethod
    def _make_durable(self) -> None: ...

    @abstractmethod
    def _close_file(self) -> None: ...

    def _hand_over(self) -> OSError | None:
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
        return os.pwrite(self._handle, data, self._written)

    def _truncate_to(self, size: int) -> None:
        self._before("truncate", self.path)
        os.ftruncate(self._handle, size)

    def _make_durable(self) -> None:
        self._before("fsync", self.path)
        os.fsync(self._handle)

    def _close_file(self) -> None:
        os.close(self._handle)
