"""File operations on local file systems, each atomic with respect to a kill."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import EINVAL, EIO, ENOTSUP
from hashlib import sha256
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

from iopath.common.file_io import PathManager

from phasetrain.runtime.storage.digest import (
    Data,
    FileRecord,
    TreeHasher,
    hash_leaves,
    leaf_ranges,
    split_blocks,
)
from phasetrain.runtime.storage.logs import LocalLog, LogFile

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}$")
"""Suffix of files and folders that are being written."""

TRASH = ".trash-"
"""Prefix of folders that are being deleted."""


READ_BYTES = 2**20
"""Bytes of a file that are in memory at a time while it is only hashed."""


class Unfinished(Exception):  # noqa: N818 - requested, not an error
    """A write was given up on request, and its files were deleted."""


class StorageReader:
    """Reads files and folders.

    Args:
        before: called with (operation, path) before each operation; tests raise in it to simulate
            a crash or a disk error at that operation.
    """

    keeps_files = True
    """Whether paths are local files, with locks, renames and appending."""

    def __init__(self, before: Callable[[str, str], None] | None = None) -> None:
        self._files = PathManager()
        self._before = before or (lambda operation, path: None)
        # Temporary files that a thread of this process is about to rename.
        self._unfinished: set[str] = set()

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder exists."""
        return bool(self._files.exists(path))

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if it does not exist."""
        if self._files.isdir(folder):
            return sorted(self._files.ls(folder))
        return []

    def file_size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if only reading it would tell."""
        return Path(path).stat().st_size

    def free_bytes(self, folder: str) -> int | None:
        """Return the free bytes on the file system of `folder`; None if unknown."""
        with suppress(OSError):
            # Fails for a folder that does not exist yet.
            return shutil.disk_usage(folder).free
        return None

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        self._before("read", path)
        with cast(BinaryIO, self._files.open(path, "rb", buffering=0)) as file:
            return file.read()

    def read_hashed(self, path: str) -> tuple[bytearray, str]:
        """Return the content of a file in writable memory, and its `tree_digest`."""
        content = bytearray(Path(path).stat().st_size)
        return content, self.read_into(path, split_blocks(content))

    def read_into(self, path: str, pieces: Iterable[memoryview]) -> str:
        """Fill writable memory with the content of a file, piece by piece from its start.

        Args:
            path: the file.
            pieces: where to put it, at most as long as the file; the next one is asked for once the
                one before is filled.

        Returns:
            The `tree_digest` of the bytes read.

        Raises:
            OSError: the file cannot be read, or is shorter.
        """
        # Read and hashed in one pass, so that a large file is read from disk once.
        self._before("read", path)
        with self._open_binary(path) as file, TreeHasher() as hasher:
            for piece in pieces:
                read = 0
                while read < len(piece):
                    count = file.readinto(piece[read:])
                    if not count:
                        raise OSError(EIO, "the file became shorter while it was read", path)
                    read += count
                hasher.add(piece)
            return hasher.digest()

    def hash_file(self, path: str) -> FileRecord:
        """Return the size and the `tree_digest` of a file, without keeping its content in memory.

        Raises:
            OSError: the file cannot be read, or becomes shorter meanwhile.
        """
        self._before("read", path)
        with self._open_binary(path) as file, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            size = os.fstat(file.fileno()).st_size
            leaves = pool.map(lambda span: _hash_part(file.fileno(), *span), leaf_ranges(size))
            return FileRecord(size, hash_leaves(leaves))

    def _open_binary(self, path: str) -> RawIOBase:
        return cast(RawIOBase, self._files.open(path, "rb", buffering=0))

    def read_json(self, path: str) -> Any:
        """Return the content of a JSON file, or None if it is missing, truncated or a folder."""
        try:
            return json.loads(self.read(path))
        except (
            FileNotFoundError,
            IsADirectoryError,
            json.JSONDecodeError,
            UnicodeDecodeError,
            RecursionError,
        ):
            return None

    def local_path(self, path: str) -> str:
        """Return the path of a file on a local file system."""
        return str(self._files.get_local_path(path))


class Storage(StorageReader):
    """Changes files and folders so that a kill at any moment leaves the old or the new content.

    Args:
        before: see `StorageReader`.
    """

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, if they do not exist."""
        self._before("make_folder", path)
        self._files.mkdirs(path)

    def create(
        self, path: str, data: Data, *, give_up: Callable[[], bool] = lambda: False
    ) -> FileRecord:
        """Write a new file and fsync it, and hash it at the same time.

        Args:
            path: the file.
            data: its content.
            give_up: polled between blocks of 64 MiB; True stops the write.

        Raises:
            FileExistsError: the file exists.
            OSError: the error of the file system, with errno.
            Unfinished: the write was given up.
        """
        self._before("create", path)
        with TreeHasher() as hasher:
            with cast(BinaryIO, self._files.open(path, "xb")) as file:
                self._before("write", path)
                for block in split_blocks(data):
                    if give_up():
                        raise Unfinished(path)
                    hasher.add(block)
                    file.write(block)
                file.flush()
                self._before("fsync", path)
                os.fsync(file.fileno())
            return FileRecord(size=memoryview(data).nbytes, digest=hasher.digest())

    def replace(self, path: str, data: Data, *, durable: bool = True) -> None:
        """Replace a file atomically: a reader sees either the old or the new content.

        Args:
            path: the file.
            data: its new content.
            durable: survive a power failure after the return; costs two fsyncs.
        """
        # In the same folder, since a rename is atomic only within a file system.
        temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
        self._before("create", temporary)
        self._unfinished.add(temporary)
        try:
            with cast(BinaryIO, self._files.open(temporary, "xb")) as file:
                file.write(data)
                file.flush()
                if durable:
                    # Before the rename: file systems may otherwise persist the new name first, and
                    # a power failure would leave an empty file.
                    self._before("fsync", temporary)
                    os.fsync(file.fileno())
            self._before("rename", path)
            Path(temporary).replace(path)
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            self._unfinished.discard(temporary)
        if durable:
            self.sync_folder(_parent_of(path))

    def replace_json(self, path: str, content: Any, *, durable: bool = True) -> None:
        """Replace a JSON file, see `replace`."""
        self.replace(path, (json.dumps(content, indent=1) + "\n").encode(), durable=durable)

    def begin_folder(self, folder: str) -> str:
        """Create a working folder, which `publish_folder` renames, and return its path."""
        working = f"{folder}.tmp-{uuid.uuid4().hex[:8]}"
        self.make_folder(working)
        return working

    def publish_folder(self, working: str, folder: str) -> None:
        """Rename the working folder to its final name, durably."""
        # First the names in the folder, then the rename, then the new name in the parent: after a
        # power failure the folder is complete or absent.
        self.sync_folder(working)
        self._before("rename", folder)
        Path(working).rename(folder)
        self.sync_folder(_parent_of(folder))

    def rename_folder(self, folder: str, new: str) -> None:
        """Rename a folder durably."""
        self._before("rename", new)
        Path(folder).rename(new)
        self.sync_folder(_parent_of(new))

    def abandon_folder(self, working: str, folder: str) -> None:
        """Delete a working folder, also after a failed `publish_folder`."""
        # Publishing may have failed after the rename: back to a temporary name first, so that a
        # kill during the deletion leaves no half-empty folder under the final name.
        if not self.exists(working) and self.exists(folder):
            self._before("rename", working)
            Path(folder).rename(working)
        self.remove(working)

    def delete_folder(self, folder: str, last: str) -> None:
        """Delete a published folder, atomically for readers.

        Args:
            folder: the folder.
            last: name of the file that was written last; used by object stores.
        """
        parent, _, name = folder.rpartition("/")
        trash = f"{parent}/{TRASH}{name}-{uuid.uuid4().hex[:8]}"
        self._before("rename", trash)
        Path(folder).rename(trash)
        self.remove(trash)

    def delete_leftovers(self, root: str, is_folder: Callable[[str], bool], last: str) -> list[str]:
        """Delete remains of interrupted operations under `root`, and return their names.

        Args:
            root: folder to look in.
            is_folder: matches the names of published folders.
            last: see `delete_folder`.
        """
        left = [
            name
            for name in self.list_names(root)
            if (TEMPORARY.search(name) or name.startswith(TRASH))
            # A checkpoint may be written while another thread replaces a file next to it.
            and f"{root}/{name}" not in self._unfinished
        ]
        for name in left:
            self.remove(f"{root}/{name}")
        return left

    def sync_folder(self, folder: str) -> None:
        """Fsync a folder, which makes renames in it durable; not every file system supports it."""
        self._before("fsync", folder)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (EINVAL, ENOTSUP):
                raise
        finally:
            os.close(handle)

    def remove(self, path: str) -> None:
        """Delete a file, a link, or a folder file by file; a missing one is ignored."""
        self._before("remove", path)
        if Path(path).is_symlink():  # delete the link, not its target
            Path(path).unlink()
        elif self._files.isdir(path):
            for name in self.list_names(path):
                self.remove(f"{path}/{name}")
            Path(path).rmdir()
        elif self._files.exists(path):
            self._files.rm(path)

    def log_file(self, path: str) -> LogFile:
        """Open a file for appending; it is created if needed."""
        self._before("open", path)
        return LocalLog(path, self._before)


def _parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "."


def _hash_part(handle: int, start: int, end: int) -> bytes:
    """Return the SHA-256 of the bytes of an open file from `start` to `end`."""
    digest = sha256()
    while start < end:
        # At an offset, not through the position of the file, which the threads share.
        content = os.pread(handle, min(READ_BYTES, end - start), start)
        if not content:
            raise OSError(EIO, "the file became shorter while it was read")
        digest.update(content)
        start += len(content)
    return digest.digest()
