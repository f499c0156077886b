"""File operations on an object store behind an iopath handler, or behind fsspec.

An object store writes whole objects, and can neither rename nor append.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from io import RawIOBase
from typing import Any, BinaryIO, cast

from iopath.common.file_io import PathHandler

from phasetrain.addons.remote.cache import fetch
from phasetrain.addons.remote.handler import RUN_SCHEMES, RemoteHandler, check_run_place
from phasetrain.addons.remote.systems import stat_url
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.storage import HANDLERS, TEMPORARY, LogFile, Storage, Unfinished
from phasetrain.runtime.storage.digest import Data, FileRecord, tree_digest
from phasetrain.runtime.storage.urls import redact_url, scheme_of


def open_objects(path: str, before: Callable[[str, str], None] | None = None) -> Storage:
    """Return the backend for `PREFIX://...`.

    A registered handler comes first, then the file systems of fsspec.

    Raises:
        ConfigError: no handler and no file system has the prefix, or a package is missing.
    """
    prefix = path.partition("://")[0]
    if prefix in HANDLERS:
        return ObjectStorage(HANDLERS[prefix](), before)
    try:
        return ObjectStorage(RemoteHandler(prefix), before)
    except ConfigError as error:
        if error.code != "remote.unknown_scheme":
            raise
        raise _unknown_prefix(path, prefix) from error


def open_run_objects(path: str) -> Storage:
    """Return the backend for a run folder `PREFIX://...`.

    Raises:
        ConfigError: see `open_objects`; or the store cannot keep a run.
    """
    storage = open_objects(path)
    # The author of a handler answers for its store.
    if scheme_of(path) not in HANDLERS:
        check_run_place(path)
    return storage


def _unknown_prefix(path: str, prefix: str) -> ConfigError:
    prefixes = [*HANDLERS, *RUN_SCHEMES]
    return ConfigError(
        f"RUN.dir = {redact_url(path)!r}: no path handler is registered for {prefix}://"
        f"{did_you_mean(prefix, prefixes)} Known: {', '.join(f'{name}://' for name in prefixes)}; "
        f"register an iopath handler with @phasetrain.runtime.storage.HANDLERS.register({prefix!r})"
        " in a module of RUN.imports, or give a path of this machine",
        code="storage.unknown_prefix",
    )


class ObjectAccess(Storage):
    """Reads, writes and deletes single objects.

    Args:
        handler: opens, lists and deletes objects.
        before: see `StorageReader`.
    """

    keeps_files = False

    def __init__(
        self, handler: PathHandler, before: Callable[[str, str], None] | None = None
    ) -> None:
        super().__init__(before)
        self._files.register_handler(handler)

    def file_size(self, path: str) -> int | None:
        """Return None: handlers do not report sizes."""
        return None

    def free_bytes(self, folder: str) -> int | None:
        """Return None: an object store has no known limit."""
        return None

    def read(self, path: str) -> bytes:
        """Return the content of an object."""
        self._before("read", path)
        with cast(BinaryIO, self._files.open(path, "rb")) as file:
            return file.read()

    def read_hashed(self, path: str) -> tuple[bytearray, str]:
        """Return the content of an object in writable memory, and its `tree_digest`."""
        content = bytearray(self.read(path))
        return content, tree_digest(content)

    def hash_file(self, path: str) -> FileRecord:
        """Return the size and the `tree_digest` of an object."""
        content = self.read(path)
        return FileRecord(len(content), tree_digest(content))

    def create(
        self, path: str, data: Data, *, give_up: Callable[[], bool] = lambda: False
    ) -> FileRecord:
        """Write a new object and hash it."""
        self._before("create", path)
        if self.exists(path):
            raise FileExistsError(path)
        if give_up():
            raise Unfinished(path)
        self._write_object(path, data)
        return FileRecord(size=memoryview(data).nbytes, digest=tree_digest(data))

    def replace(self, path: str, data: Data, *, durable: bool = True) -> None:
        """Write an object, replacing an existing one."""
        self._write_object(path, data)

    def sync_folder(self, folder: str) -> None:
        """Do nothing: a written object is durable."""

    def remove(self, path: str) -> None:
        """Delete an object, or all objects below a path."""
        self._before("remove", path)
        for name in self.list_names(path):
            self.remove(f"{path}/{name}")
        if self._files.isfile(path):
            self._files.rm(path)

    def log_file(self, path: str) -> LogFile:
        """Return a log that is kept in memory, and written as a whole when it is synced."""
        return _ObjectLog(
            path, self.read(path) if self._files.isfile(path) else b"", self._write_object
        )

    def local_path(self, path: str) -> str:
        """Reject the path: an object is not a local file.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"RUN.dir: {path!r} is on an object store, and this part can only use local files; set "
            "RUN.dir to a folder on this machine",
            code="storage.not_local",
        )

    def _open_binary(self, path: str) -> RawIOBase:
        return cast(RawIOBase, self._files.open(path, "rb"))

    def _write_object(self, path: str, data: Any) -> None:
        self._before("write", path)
        with cast(BinaryIO, self._files.open(path, "wb")) as file:
            file.write(data)


class ObjectStorage(ObjectAccess):
    """Folders of objects, committed by writing their last object.

    A marker object is in a folder while it is written or deleted, so that the remains of a kill
    differ from a damaged folder.

    Args:
        handler: opens, lists and deletes objects.
        before: see `StorageReader`.
    """

    def begin_folder(self, folder: str) -> str:
        """Mark `folder` as being written, and return it."""
        self._add_marker(folder)
        return folder

    def publish_folder(self, working: str, folder: str) -> None:
        """Remove the marker; writing the last object was the commit."""
        with suppress(OSError):  # delete_leftovers removes it later
            self._remove_markers(folder)

    def abandon_folder(self, working: str, folder: str) -> None:
        """Delete the objects of the folder."""
        self.remove(folder)

    def delete_folder(self, folder: str, last: str) -> None:
        """Delete the objects of a folder."""
        # First the one written last, without which the folder counts as unfinished; the marker at
        # the end, so that an interrupted deletion is completed by delete_leftovers.
        self._add_marker(folder)
        self.remove(f"{folder}/{last}")
        for name in sorted(self.list_names(folder), key=lambda name: bool(TEMPORARY.search(name))):
            self.remove(f"{folder}/{name}")

    def delete_leftovers(self, root: str, is_folder: Callable[[str], bool], last: str) -> list[str]:
        """Delete marked folders without their last object, and unmark those that have it."""
        left = []
        for name in filter(is_folder, self.list_names(root)):
            inside = self.list_names(f"{root}/{name}")
            if not any(map(TEMPORARY.search, inside)):
                continue
            if last in inside:
                self._remove_markers(f"{root}/{name}")
            else:
                self.remove(f"{root}/{name}")
                left.append(name)
        return left

    def _add_marker(self, folder: str) -> None:
        self._write_object(f"{folder}/written.tmp-{uuid.uuid4().hex[:8]}", b"")

    def _remove_markers(self, folder: str) -> None:
        for name in filter(TEMPORARY.search, self.list_names(folder)):
            self.remove(f"{folder}/{name}")


class CachedObjects(ObjectAccess):
    """Files elsewhere that are only read, through verified copies on this machine.

    Args:
        path: the file or folder; a URL.
        digest: expected SHA-256 of the file; empty accepts any content.
        before: see `StorageReader`.
    """

    def __init__(
        self, path: str, digest: str = "", before: Callable[[str, str], None] | None = None
    ) -> None:
        super().__init__(RemoteHandler(scheme_of(path)), before)
        self._copies = Storage(before)
        self._digests = {path: digest}

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder exists.

        Raises:
            ConfigError: it must not be read.
            RemoteError: the server cannot be reached.
        """
        try:
            stat_url(path)
        except ConfigError as error:
            if error.code != "remote.not_found":
                raise
            return False
        return True

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return self._copies.read(self.local_path(path))

    def read_hashed(self, path: str) -> tuple[bytearray, str]:
        """Return the content of a file in writable memory, and its `tree_digest`."""
        return self._copies.read_hashed(self.local_path(path))

    def hash_file(self, path: str) -> FileRecord:
        """Return the size and the `tree_digest` of a file."""
        return self._copies.hash_file(self.local_path(path))

    def local_path(self, path: str) -> str:
        """Return the path of the verified copy.

        Raises:
            ConfigError: see `phasetrain.addons.remote.cache.fetch`.
            FileNotFoundError: there is no such file.
        """
        try:
            return fetch(path, self._digests.get(path, "")).path
        except ConfigError as error:
            if error.code == "remote.not_found":
                raise FileNotFoundError(str(error)) from error
            raise

    def _open_binary(self, path: str) -> RawIOBase:
        return self._copies._open_binary(self.local_path(path))


class _ObjectLog(LogFile):
    def __init__(self, path: str, content: bytes, put: Callable[[str, Any], None]) -> None:
        super().__init__(path, len(content))
        self._content = bytearray(content)
        self._write_object = put
        self._durable = len(content)

    def read(self) -> bytes:
        return bytes(self._content)

    def _append_bytes(self, data: bytes) -> int:
        self._content += data
        return len(data)

    def _truncate_to(self, size: int) -> None:
        del self._content[size:]
        self._durable = -1

    def _make_durable(self) -> None:
        if self._durable != len(self._content):
            content = bytes(self._content)
            self._write_object(self.path, content)
            self._durable = len(content)

    def _close_file(self) -> None:
        with suppress(OSError):
            self._make_durable()
