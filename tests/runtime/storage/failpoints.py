"""Shared by tests of storage and checkpoints: places to write to, and failpoints that act out a
crash or a bad disk."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from phasetrain.runtime.storage import Storage
from phasetrain.testing import MemoryHandler

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


class Died(BaseException):
    """The process is gone: no handler of the package takes it."""


class Failpoint:
    """Raises before the operation of a number, from 0; counts them.

    Args:
        number: None never raises.
        error: makes what is raised, of the path.
        lasting: raises before every later operation as well.
    """

    def __init__(
        self,
        number: int | None,
        error: Callable[[str], BaseException] = Died,
        *,
        lasting: bool = False,
    ) -> None:
        self.number, self.error, self.lasting, self.seen = number, error, lasting, 0
        self.raised = 0

    def __call__(self, operation: str, path: str) -> None:
        at, self.seen = self.seen, self.seen + 1
        if self.number is not None and (at >= self.number if self.lasting else at == self.number):
            self.raised += 1
            raise self.error(path)


def refused(number: int) -> Callable[[str], OSError]:
    """Return what makes the error that a disk gives with this errno."""
    return lambda path: OSError(number, os.strerror(number), path)


class Refusing:
    """Raises before each operation of a kind on a path that ends so."""

    def __init__(self, operation: str, end: str = "", number: int = errno.ENOSPC) -> None:
        self.operation, self.end, self.number = operation, end, number

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation and path.endswith(self.end):
            raise refused(self.number)(path)


class Place(Protocol):
    """A folder to write to.

    Attributes:
        path: the folder.
    """

    path: str

    def storage(self, before: Callable[[str, str], None] | None = None) -> Storage: ...

    def content(self) -> dict[str, bytes]:
        """Return what is there: path below the folder -> content, and an empty text for an empty
        folder."""
        ...


class Files:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        path.mkdir()

    def storage(self, before: Callable[[str, str], None] | None = None) -> Storage:
        return Storage(before)

    def content(self) -> dict[str, bytes]:
        found = Path(self.path).rglob("*")
        kept = [path for path in found if path.is_file() or not any(path.iterdir())]
        return {
            str(path.relative_to(self.path)): path.read_bytes() if path.is_file() else b""
            for path in sorted(kept)
        }


class Objects:
    """A folder of an object store that is held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = f"mem://{path.name}"
        self.objects: dict[str, bytes] = {}

    def storage(self, before: Callable[[str, str], None] | None = None) -> Storage:
        from phasetrain.addons.remote.objects import ObjectStorage

        return ObjectStorage(MemoryHandler(self.objects), before)

    def content(self) -> dict[str, bytes]:
        return {
            path.removeprefix(f"{self.path}/"): self.objects[path] for path in sorted(self.objects)
        }


PLACES = [
    pytest.param(Files, id="files"),
    pytest.param(Objects, id="objects", marks=pytest.mark.addon("remote")),
]


def top(place: Place) -> list[str]:
    """Return the names in a place, sorted."""
    return sorted({path.partition("/")[0] for path in place.content()})
