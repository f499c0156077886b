"""Objects behind fsspec, as an iopath handler: each is uploaded as a whole."""

import io
from collections.abc import Callable
from types import TracebackType
from typing import Any

from iopath.common.file_io import PathHandler

from phasetrain.addons.remote.systems import TruncatedError, find_system, open_system, retry
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import RemoteError
from phasetrain.runtime.storage.urls import redact_url, scheme_of

RUN_SCHEMES = ("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""Stores that show an object as a whole once it is written, and list it at once."""


class RemoteHandler(PathHandler):
    """Objects of any scheme of fsspec, with retries.

    An object is collected in memory and uploaded when its file is closed, and never if the writer
    ends with an error: a kill leaves the old object or the new one.

    Args:
        scheme: such as `s3`.

    Raises:
        ConfigError: the scheme is unknown, or a package is missing.
    """

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self._scheme = scheme
        find_system(scheme)

    def _get_supported_prefixes(self) -> list[str]:
        return [f"{self._scheme}://"]

    def _open(
        self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any
    ) -> io.BytesIO | io.TextIOWrapper:
        if mode == "wb":
            return ObjectWriter(lambda content: self._upload(path, content))
        if mode not in ("r", "rb"):
            raise io.UnsupportedOperation(
                f"{redact_url(path)} cannot be opened with mode {mode!r}: an object is read (r, "
                "rb) or written as a whole (wb)"
            )
        content = io.BytesIO(self._ask(path, lambda: _download(path)))
        if mode == "rb":
            return content
        return io.TextIOWrapper(content, encoding="utf-8")

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return bool(self._find_type(path))

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return self._find_type(path) == "file"

    def _isdir(self, path: str, **kwargs: Any) -> bool:
        # A folder is a prefix. Servers of HTTP have none: fsspec would read their pages for links.
        return scheme_of(path) not in ("http", "https") and bool(self._ls(path))

    def _ls(self, path: str, **kwargs: Any) -> list[str]:
        """Return the sorted names directly below a path."""

        def list_names() -> list[str]:
            system = open_system(path)
            own = system._strip_protocol(path).strip("/")
            try:
                entries = system.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            below = (str(name).strip("/") for name in entries)
            return sorted(
                name.rpartition("/")[2] for name in below if name.startswith(own) and name != own
            )

        names: list[str] = self._ask(path, list_names)
        return names

    def _mkdirs(self, path: str, **kwargs: Any) -> None:
        """Do nothing: a prefix exists as soon as an object has it."""

    def _rm(self, path: str, **kwargs: Any) -> None:
        self._ask(path, lambda: open_system(path).rm_file(path))

    def _upload(self, path: str, content: bytes) -> None:
        # One call, not `open(path, "wb")`: fsspec completes that upload after an error as well.
        self._ask(path, lambda: open_system(path).pipe_file(path, content))

    def _find_type(self, path: str) -> str:
        """Return `file`, `directory`, or an empty text if there is neither."""
        # Not fsspec's `exists`, which takes an answer such as 503 for a missing file.
        try:
            return str(self._ask(path, lambda: open_system(path).info(path))["type"])
        except FileNotFoundError:
            return ""

    def _ask(self, path: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call.

        Raises:
            OSError: it failed; the errors that the users of a storage expect.
        """
        try:
            return retry(path, call)
        except ConfigError as error:
            if error.code == "remote.not_found":
                raise FileNotFoundError(str(error)) from error
            if error.code == "remote.forbidden":
                raise PermissionError(str(error)) from error
            raise
        except RemoteError as error:
            raise OSError(str(error)) from error


def _download(path: str) -> bytes:
    system = open_system(path)
    size = system.info(path).get("size")
    content: bytes = system.cat_file(path)
    # Else a truncated object would count as a damaged checkpoint, and an older one would be used.
    if size is not None and len(content) != size:
        raise TruncatedError(f"{len(content)} of {size} bytes have arrived")
    return content


def check_run_place(path: str) -> None:
    """Reject a run folder in a store that cannot keep one.

    Raises:
        ConfigError: it is not a store of whole objects (code `storage.unsuitable`).
    """
    scheme = scheme_of(path)
    if scheme in RUN_SCHEMES:
        return
    if scheme in ("http", "https"):
        reason = "HTTP can only be read"
    else:
        reason = (
            f"{scheme}:// does not promise that an object becomes visible as a whole and at once, "
            "without which a kill can damage checkpoints"
        )
    raise ConfigError(
        f"RUN.dir = {redact_url(path)!r}: {reason}; set RUN.dir to a folder of this machine or to "
        f"one of {', '.join(f'{name}://' for name in RUN_SCHEMES)}, or register an iopath handler "
        "that does",
        code="storage.unsuitable",
    )


class ObjectWriter(io.BytesIO):
    """Publishes its content when it is closed, unless it is dropped or left by an error.

    Args:
        publish: takes the content.
    """

    def __init__(self, publish: Callable[[bytes], None]) -> None:
        super().__init__()
        self._publish: Callable[[bytes], None] | None = publish

    def discard(self) -> None:
        """Drop the content."""
        self._publish = None

    def close(self) -> None:
        """Publish the content; a second call does nothing."""
        if not self.closed and self._publish is not None:
            publish, self._publish = self._publish, None
            publish(self.getvalue())
        super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        super().__exit__(kind, error, trace)

    def __del__(self) -> None:
        # io.IOBase closes a dropped file, which would publish an incomplete object.
        self.discard()
