"""File operations on this machine's file systems."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from errno import EINVAL, EIO, ENOTSUP
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from iopath.common.file_io import PathManager

from phasetrain.runtime.storage.digest import Data, FileRecord, TreeHasher, blocks
from phasetrain.runtime.storage.logs import LocalLog, LogFile

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}$")
"""How the names of files and folders end that are being written."""

TRASH = ".trash-"
"""How the names of folders begin that are being deleted."""


class Unfinished(Exception):  # noqa: N818 - it is no error: somebody asked for it
    """A write was given up on request; what it had written is gone."""


class Storage:
    """Files and folders of this machine, changed so that a kill at any moment leaves the old or the
    new.

    Args:
        before: called with (operation, path) before each operation; a test raises there to act out
            a crash or an error of the disk at that very operation.
    """

    keeps_files = True
    """Whether paths are files of this machine, with locks, renames and appending."""

    def __init__(self, before: Callable[[str, str], None] | None = None) -> None:
        self._files = PathManager()
        self._before = before or (lambda operation, path: None)

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder exists."""
        return bool(self._files.exists(path))

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; none where it does not exist."""
        if self._files.isdir(folder):
            return sorted(self._files.ls(folder))
        return []

    def file_size(self, path: str) -> int | None:
        """Return the bytes of a file; None where only reading it would tell."""
        return Path(path).stat().st_size

    def free_bytes(self, folder: str) -> int | None:
        """Return the bytes that are left for files in `folder`; None where nobody can tell."""
        with suppress(OSError):
            return shutil.disk_usage(folder).free
        return None

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        self._before("read", path)
        with cast(BinaryIO, self._files.open(path, "rb", buffering=0)) as file:
            return file.read()

    def read_hashed(self, path: str) -> tuple[bytearray, str]:
        """Return the content of a large file, in memory that may be written to, and its
        `tree_digest`."""
        self._before("read", path)
        with (
            cast(FileIO, self._files.open(path, "rb", buffering=0)) as file,
            TreeHasher() as hasher,
        ):
            content = bytearray(os.fstat(file.fileno()).st_size)
            for block in blocks(content):
                read = 0
                while read < len(block):
                    if not (count := file.readinto(block[read:])):
                        raise OSError(EIO, "the file became shorter while it was read", path)
                    read += count
                hasher.add(block)
            return content, hasher.digest()

    def read_json(self, path: str) -> Any:
        """Return the content of a JSON file, or None where there is none, or it is torn or a
        folder."""
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

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents; one that exists is fine."""
        self._before("make_folder", path)
        self._files.mkdirs(path)

    def create(
        self, path: str, data: Data, *, give_up: Callable[[], bool] = lambda: False
    ) -> FileRecord:
        """Write a new file, durable on return, and hash it on the way.

        Args:
            give_up: asked between blocks of 64 MiB whether to stop writing.

        Raises:
            FileExistsError: the file exists.
            OSError: whatever the file system says; errno is kept.
            Unfinished: it was given up.
        """
        self._before("create", path)
        with TreeHasher() as hasher:
            with cast(BinaryIO, self._files.open(path, "xb")) as file:
                self._before("write", path)
                for block in blocks(data):
                    if give_up():
                        raise Unfinished(path)
                    hasher.add(block)
                    file.write(block)
                file.flush()
                self._before("fsync", path)
                os.fsync(file.fileno())
            return FileRecord(size=memoryview(data).nbytes, digest=hasher.digest())

    def replace(self, path: str, data: Data, *, durable: bool = True) -> None:
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
            Path(temporary).replace(path)
        except OSError:
            with suppress(OSError):  # the first error is the one to tell
                Path(temporary).unlink(missing_ok=True)
            raise
        if durable:
            self.sync_folder(_parent_of(path))

    def replace_json(self, path: str, content: Any, *, durable: bool = True) -> None:
        """Write a JSON file as `replace` does, indented."""
        self.replace(path, (json.dumps(content, indent=1) + "\n").encode(), durable=durable)

    def begin_folder(self, folder: str) -> str:
        """Return the path of a new folder to write in, from which `publish` makes `folder`."""
        working = f"{folder}.tmp-{uuid.uuid4().hex[:8]}"
        self.make_folder(working)
        return working

    def publish_folder(self, working: str, folder: str) -> None:
        """Give the folder its final name: from here on it exists, and durably when this returns."""
        self.sync_folder(working)
        self._before("rename", folder)
        Path(working).rename(folder)
        self.sync_folder(_parent_of(folder))

    def abandon_folder(self, working: str, folder: str) -> None:
        """Take back what `begin` began and `publish`, perhaps, did not bring to its end."""
        if not self.exists(working) and self.exists(folder):
            self._before("rename", working)
            Path(folder).rename(working)
        self.remove(working)

    def delete_folder(self, folder: str, last: str) -> None:
        """Delete a folder that was published; from the first moment on it is no longer listed.

        Args:
            last: name of the file in it that was written last and vouches for the others.
        """
        parent, _, name = folder.rpartition("/")
        trash = f"{parent}/{TRASH}{name}-{uuid.uuid4().hex[:8]}"
        self._before("rename", trash)
        Path(folder).rename(trash)
        self.remove(trash)

    def delete_leftovers(self, root: str, is_folder: Callable[[str], bool], last: str) -> list[str]:
        """Clear away what an interrupted `publish` or `discard` left under `root`, and return the
        names.

        Args:
            is_folder: tells the names that `publish` gives.
            last: see `discard`.
        """
        left = [
            name
            for name in self.list_names(root)
            if TEMPORARY.search(name) or name.startswith(TRASH)
        ]
        for name in left:
            self.remove(f"{root}/{name}")
        return left

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder durable; a file system that cannot do so is accepted."""
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
        """Delete a file, a link, or a folder file by file; one that is already gone is fine."""
        self._before("remove", path)
        if Path(path).is_symlink():  # what it leads to is somebody else's
            Path(path).unlink()
        elif self._files.isdir(path):
            for name in self.list_names(path):
                self.remove(f"{path}/{name}")
            Path(path).rmdir()
        elif self._files.exists(path):
            self._files.rm(path)

    def log_file(self, path: str) -> LogFile:
        """Return a file that grows by appending; created if need be."""
        self._before("open", path)
        return LocalLog(path, self._before)

    def local_path(self, path: str) -> str:
        """Return the path of a file on this machine's file system."""
        return str(self._files.get_local_path(path))


def _parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "."
