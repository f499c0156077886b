"""The one door to files: every operation on a run folder goes through iopath's PathManager and a numbered failpoint."""

import json
import os
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import EINVAL, ENOTSUP
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

from iopath.common.file_io import PathManager

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}$")
"""How the names of files and folders end that are being written."""

BLOCK = 64 * 2**20
"""Bytes that are hashed as one leaf of a file's digest."""


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file.

    Attributes:
        size: bytes.
        digest: `tree_digest` of the content, hexadecimal.
    """

    size: int
    digest: str


def tree_digest(data: bytes | memoryview) -> str:
    """Return SHA-256 over the SHA-256 digests of the 64 MiB blocks of `data`, hexadecimal; blocks run in threads."""
    view = memoryview(data)
    blocks = [view[at : at + BLOCK] for at in range(0, len(view), BLOCK)]
    if len(blocks) <= 1:
        leaves = [sha256(block).digest() for block in blocks]
    else:
        with ThreadPoolExecutor(max_workers=min(len(blocks), os.cpu_count() or 1)) as pool:
            leaves = list(pool.map(lambda block: sha256(block).digest(), blocks))
    return sha256(b"".join(leaves)).hexdigest()


class Storage:
    """File operations on a POSIX file system.

    Args:
        before: called with (operation, path) before each operation that changes something; a test raises
            there to act out a crash at that very operation.
    """

    def __init__(self, before: Callable[[str, str], None] | None = None) -> None:
        self._files = PathManager()
        self._before = before or (lambda operation, path: None)

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder exists."""
        return bool(self._files.exists(path))

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; none where it does not exist."""
        return sorted(self._files.ls(folder)) if self._files.isdir(folder) else []

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        with self._files.open(path, "rb") as file:
            return cast(bytes, file.read())

    def read_json(self, path: str) -> Any:
        """Return the content of a JSON file, or None where there is none or it is torn."""
        try:
            return json.loads(self.read(path))
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return None

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents; one that exists is fine."""
        self._before("make_folder", path)
        self._files.mkdirs(path)

    def create(self, path: str, data: bytes | memoryview) -> FileRecord:
        """Write a new file, durable on return, and hash it on the way.

        Raises:
            FileExistsError: the file exists.
            OSError: whatever the file system says; errno is kept.
        """
        self._before("create", path)
        with ThreadPoolExecutor(max_workers=1) as pool:
            digest = pool.submit(tree_digest, data)
            with cast(BinaryIO, self._files.open(path, "xb")) as file:
                self._before("write", path)
                file.write(data)
                file.flush()
                self._before("fsync", path)
                os.fsync(file.fileno())
            return FileRecord(size=len(data), digest=digest.result())

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file so that a reader sees the old content or the new, and nothing between.

        Args:
            durable: survive a power cut from the return on; costs an fsync.
        """
        temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
        self._before("create", temporary)
        try:
            with cast(BinaryIO, self._files.open(temporary, "xb")) as file:
                file.write(data)
                file.flush()
                if durable:
                    self._before("fsync", temporary)
                    os.fsync(file.fileno())
            self._before("rename", path)
            Path(self.local(temporary)).replace(self.local(path))
        except OSError:
            Path(self.local(temporary)).unlink(missing_ok=True)
            raise
        if durable:
            self.sync_folder(str(Path(path).parent))

    def replace_json(self, path: str, content: Any, *, durable: bool = True) -> None:
        """Write a JSON file as `replace` does, indented."""
        self.replace(path, (json.dumps(content, indent=1) + "\n").encode(), durable=durable)

    def rename(self, old: str, new: str) -> None:
        """Give a file or folder a new name on the same file system."""
        self._before("rename", new)
        Path(self.local(old)).rename(self.local(new))

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder durable; a file system that cannot do so is accepted."""
        self._before("fsync", folder)
        handle = os.open(self.local(folder), os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (EINVAL, ENOTSUP):
                raise
        finally:
            os.close(handle)

    def remove(self, path: str) -> None:
        """Delete a file, or a folder file by file; one that is already gone is fine."""
        self._before("remove", path)
        if self._files.isdir(path):
            for name in self.names(path):
                self.remove(f"{path}/{name}")
            Path(self.local(path)).rmdir()
        elif self._files.exists(path):
            self._files.rm(path)

    def local(self, path: str) -> str:
        """Return the path of a file on this machine's file system."""
        return str(self._files.get_local_path(path))
