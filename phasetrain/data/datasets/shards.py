"""Files that are read forward, and the index of offsets into them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from phasetrain.errors import ConfigError

FORMAT = 2

Places = Callable[[str], tuple[int, Sequence[int]]]
"""Scans a file, and returns its number of samples and the byte at which each stride begins."""


@dataclass(frozen=True)
class IndexedFile:
    """The index entry of a file.

    Attributes:
        path: path of the file.
        size: size in bytes.
        time: time of the last change, in nanoseconds.
        samples: number of samples.
        places: byte at which each stride of samples begins, after decompression.
    """

    path: str
    size: int
    time: int
    samples: int
    places: tuple[int, ...]


class FileStream(ABC):
    """Indexed files as a stream, each file a shard.

    Args:
        shards: the files.
    """

    def __init__(self, shards: Sequence[IndexedFile]) -> None:
        self.shards = tuple(shards)

    def shard_lengths(self) -> Sequence[int]:
        """Return the number of samples of each file."""
        return [shard.samples for shard in self.shards]

    @abstractmethod
    def read(self, shard: int, start: int) -> Iterator[Any]:
        """Yield the samples of a file from the `start`-th on."""


def digest_files(files: Iterable[IndexedFile], names: Iterable[str]) -> str:
    """Return the SHA-256 over name, size and number of samples of each file, in order."""
    digest = sha256()
    for name, file in zip(names, files, strict=True):
        # Names and sizes only: hashing the content would read the whole dataset at each start.
        line = f"{name}\0{file.size}\0{file.samples}\n"
        # surrogateescape, because names of files may be arbitrary bytes.
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def find_files(files: str | Sequence[str]) -> list[str]:
    """Return the files that match patterns, each once, sorted by name within a pattern.

    Raises:
        ValueError: a pattern matches no file.
    """
    found = []
    for pattern in [files] if isinstance(files, str) else files:
        matches = glob(pattern, recursive=True)  # noqa: PTH207 - `**` of any path
        paths = sorted(path for path in matches if Path(path).is_file())
        if not paths:
            raise ValueError(f"files = {pattern!r}: no file has this name or matches this pattern")
        found += paths
    return list(dict.fromkeys(found))


def index_files(
    paths: Sequence[str], index: str | None, *, kind: str, stride: int, places: Places
) -> tuple[IndexedFile, ...]:
    """Return the index entries of files, from an index file as far as it is current, and update it.

    Args:
        paths: paths of the files.
        index: path of the index file; None keeps none.
        kind: kind of samples, such as `lines`; an index of another kind is ignored.
        stride: samples between two offsets.
        places: scans a file that is not in the index, or has changed.

    Raises:
        ConfigError: the index file is something else.
        OSError: a file cannot be read, or the index cannot be written.
    """
    known = _read_index(index, kind, stride)
    shards = []
    for path in paths:
        status = Path(path).stat()
        shard = known.get(path)
        # Nanoseconds as an integer: the float st_mtime cannot hold them, and would miss quick
        # rewrites.
        if shard is None or (shard.size, shard.time) != (status.st_size, status.st_mtime_ns):
            count, begins = places(path)
            shard = IndexedFile(path, status.st_size, status.st_mtime_ns, count, tuple(begins))
        shards.append(shard)
    if index is not None and any(known.get(shard.path) != shard for shard in shards):
        content = {
            "format": FORMAT,
            "kind": kind,
            "stride": stride,
            "files": [asdict(shard) for shard in shards],
        }
        # A unique name and an atomic rename, because all ranks write the index at once.
        temporary = Path(f"{index}.tmp-{uuid4().hex[:8]}")
        temporary.write_text(json.dumps(content))
        temporary.replace(index)
    return tuple(shards)


def _read_index(index: str | None, kind: str, stride: int) -> Mapping[str, IndexedFile]:
    if index is None or not Path(index).exists():
        return {}
    try:
        content = json.loads(Path(index).read_text())
        if (content["format"], content.get("kind"), content["stride"]) != (FORMAT, kind, stride):
            return {}
        return {
            one["path"]: IndexedFile(**{**one, "places": tuple(one["places"])})
            for one in content["files"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"index = {index!r}: not an index of {kind} ({error}); delete it, or use another file",
            code="data.invalid_index",
        ) from error
