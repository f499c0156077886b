"""An object store in memory for iopath, with paths such as `mem://runs/a`."""

import io
from threading import Lock
from types import TracebackType
from typing import Any, ClassVar

from iopath.common.file_io import PathHandler

from phasetrain.addons.remote.handler import ObjectWriter
from phasetrain.runtime.storage import HANDLERS


@HANDLERS.register("mem")
class MemoryHandler(PathHandler):
    """Objects in memory under `mem://`, with the semantics of an object store; thread-safe.

    An object becomes visible as a whole when the file that writes it is closed, and never if the
    writer exits with an error or is dropped. A folder is a prefix and need not be created. Objects
    cannot be renamed, appended to or changed in part.

    Args:
        objects: path -> content; handlers with the same dict share their objects. By default
            `MemoryHandler.objects`, which all handlers of the process share.

    Example:
        >>> files = PathManager()
        >>> files.register_handler(MemoryHandler({}))
        >>> with files.open("mem://runs/a.txt", "w") as file:
        ...     file.write("text")
    """

    objects: ClassVar[dict[str, bytes]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self._objects = self.objects if objects is None else objects

    def _get_supported_prefixes(self) -> list[str]:
        return ["mem://"]

    def _open(
        self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any
    ) -> io.BytesIO | io.TextIOWrapper:
        if mode not in ("r", "w", "rb", "wb"):
            raise io.UnsupportedOperation(
                f"{path} cannot be opened with mode {mode!r}: an object is read (r, rb) or written "
                "as a whole (w, wb)"
            )
        if "r" in mode:
            with self._lock:
                if path not in self._objects:
                    raise FileNotFoundError(path)
                content = self._objects[path]
            if "b" in mode:
                return io.BytesIO(content)
            return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        # Stored on close(): an object store shows an upload only when it is complete.
        writer = ObjectWriter(lambda content: self._store_object(path, content))
        if "b" in mode:
            return writer
        return _TextWriter(writer)

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return self._isfile(path) or self._isdir(path)

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        with self._lock:
            return path in self._objects

    def _isdir(self, path: str, **kwargs: Any) -> bool:
        return bool(self._ls(path))

    def _ls(self, path: str, **kwargs: Any) -> list[str]:
        """Return the sorted names directly below a path."""
        prefix = path.rstrip("/") + "/" if path != "mem://" else path
        with self._lock:
            below = [name.removeprefix(prefix) for name in self._objects if name.startswith(prefix)]
        return sorted({name.partition("/")[0] for name in below})

    def _mkdirs(self, path: str, **kwargs: Any) -> None:
        """Do nothing: a prefix exists as soon as an object has it."""

    def _rm(self, path: str, **kwargs: Any) -> None:
        with self._lock:
            if path not in self._objects:
                raise FileNotFoundError(path)
            del self._objects[path]

    def _copy(
        self,
        src_path: str,
        dst_path: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002 - iopath's signature
        **kwargs: Any,
    ) -> bool:
        with self._lock:
            if src_path not in self._objects:
                raise FileNotFoundError(src_path)
            if dst_path in self._objects and not overwrite:
                raise FileExistsError(dst_path)
            self._objects[dst_path] = self._objects[src_path]
        return True

    def _mv(self, src_path: str, dst_path: str, **kwargs: Any) -> bool:
        raise io.UnsupportedOperation(
            f"{src_path} cannot be renamed to {dst_path}: object stores only copy and delete"
        )

    def _store_object(self, path: str, content: bytes) -> None:
        with self._lock:
            self._objects[path] = content


class _TextWriter(io.TextIOWrapper):
    def __init__(self, writer: ObjectWriter) -> None:
        super().__init__(writer, encoding="utf-8", newline="")
        self._writer = writer

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error_type is not None:
            self._writer.discard()
        super().__exit__(error_type, error, trace)

    def __del__(self) -> None:
        if not self.closed:
            self._writer.discard()
