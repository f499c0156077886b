"""Files elsewhere: the add-on `remote` reads and writes URLs such as `s3://...`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from iopath.common.file_io import PathHandler

from phasetrain.config.addons import require_service
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.runtime.storage.posix import Storage
from phasetrain.runtime.storage.urls import redact_url, strip_file_scheme

HandlerClass = TypeVar("HandlerClass", bound=Callable[[], PathHandler])


class PathHandlers(dict[str, Callable[[], PathHandler]]):
    """iopath handlers by the prefix of their paths."""

    def register(self, prefix: str) -> Callable[[HandlerClass], HandlerClass]:
        """Return a decorator that registers a handler class for paths that start with
        `prefix://`."""

        def add_handler(handler: HandlerClass) -> HandlerClass:
            self[prefix] = handler
            return handler

        return add_handler


HANDLERS = PathHandlers()
"""iopath handlers by prefix without `://`; one is created per storage, without arguments."""


class RemoteError(PhasetrainError):
    """A file elsewhere cannot be read or written; the message names the URL without secrets, the
    attempts, and a fix (exit code 1)."""

    default_code = "remote.unreachable"


def cache_folder() -> Path:
    """Return PHASETRAIN_CACHE, or `phasetrain` in the cache folder of the user."""
    if folder := os.environ.get("PHASETRAIN_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "phasetrain"


@dataclass(frozen=True)
class RemoteStat:
    """The facts of a file on a server.

    Attributes:
        size: bytes; None if it does not say.
        identity: changes with the content, such as an ETag; empty if the server gives nothing.
        ranges: whether parts of the file can be asked for.
    """

    size: int | None
    identity: str
    ranges: bool


@dataclass(frozen=True)
class CachedFile:
    """A verified copy on this machine.

    Attributes:
        path: the copy; read-only.
        size: bytes.
        digest: SHA-256 of the content, hexadecimal.
        identity: the server's mark of the content, see `RemoteStat`.
    """

    path: str
    size: int
    digest: str
    identity: str


def open_storage(path: str, before: Callable[[str, str], None] | None = None) -> Storage:
    """Return the backend for `path`: a `Storage` for a path of this machine, and for
    `PREFIX://...` one that a registered handler or the file systems of fsspec serve.

    Raises:
        ConfigError: no handler and no file system has the prefix, or a package or the add-on is
            missing.
    """
    if "://" not in path:
        return Storage(before)
    _reject_file_url(path)
    storage: Storage = _find("open_objects", path)(path, before)
    return storage


def open_run_storage(path: str) -> Storage:
    """Return the backend for a run folder.

    Raises:
        ConfigError: see `open_storage`; or the store cannot keep a run.
    """
    if "://" not in path:
        return Storage()
    _reject_file_url(path)
    storage: Storage = _find("open_run_objects", path)(path)
    return storage


def open_copies(url: str, digest: str = "") -> Storage:
    """Return the backend for files that are only read, through verified copies on this machine.

    Args:
        url: the file or folder.
        digest: expected SHA-256 of the file; empty accepts any content.

    Raises:
        ConfigError: no file system has the scheme, or a package or the add-on is missing.
    """
    storage: Storage = _find("open_copies", url)(url, digest)
    return storage


def fetch(url: str, digest: str = "") -> CachedFile:
    """Return a verified copy of a file elsewhere, which is downloaded unless the cache has it.

    Args:
        url: where the file is; it may end in `#sha256=...`.
        digest: expected SHA-256, hexadecimal; empty accepts any content.

    Raises:
        ConfigError: the file does not exist or must not be read, its content differs from the
            digest (code `remote.wrong_digest`), it can be verified in no way (code
            `remote.no_length`), or the cache cannot be written (code `remote.cache`).
        RemoteError: it cannot be downloaded now.
    """
    copy: CachedFile = _find("fetch", url)(url, digest)
    return copy


def stat_url(url: str) -> RemoteStat:
    """Ask the server about a file.

    Raises:
        ConfigError: it does not exist or must not be read.
        RemoteError: the server cannot be reached.
    """
    stat: RemoteStat = _find("stat_url", url)(url)
    return stat


def list_urls(pattern: str) -> list[str]:
    """Return the URLs that match a pattern with `*`, `?`, `[...]` or `**`, sorted; a URL without
    one is returned as it is.

    Raises:
        ConfigError: files of this scheme cannot be listed (code `remote.no_listing`).
        RemoteError: the server cannot be reached.
    """
    urls: list[str] = _find("list_urls", pattern)(pattern)
    return urls


def _find(service: str, url: str) -> Any:
    """Return a function of the add-on.

    Raises:
        ConfigError: it is not installed (code `addon.missing`).
    """
    return require_service(service, "remote", redact_url(url))


def _reject_file_url(path: str) -> None:
    if path.startswith("file://") and "file" not in HANDLERS:
        raise ConfigError(
            f"{path!r}: a folder of this machine is named by its path alone; write "
            f"{strip_file_scheme(path)!r}",
            code="storage.file_url",
        )
