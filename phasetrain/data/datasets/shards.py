"""Files that are read forward, here or elsewhere, and the index of offsets into them."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from glob import glob
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import fetch, is_url, list_urls, stat_url, strip_file_scheme
from phasetrain.runtime.storage.urls import (
    expand_braces,
    redact_url,
    split_digest,
    strip_secrets,
)

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
        identity: of a file elsewhere, the server's mark of the content, such as its ETag;
            `time` is 0 then.
        digest: of a file elsewhere, the SHA-256 of the content, hexadecimal.
    """

    path: str
    size: int
    time: int
    samples: int
    places: tuple[int, ...]
    identity: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """Its path; of a file elsewhere, without secrets."""
        if is_url(self.path):
            return strip_secrets(self.path)
        return self.path

    def local_path(self) -> str:
        """Return the path of the file on this machine; one from elsewhere is downloaded if need be.

        Raises:
            ConfigError: a file elsewhere has changed (code `remote.wrong_digest`).
            RemoteError: it cannot be downloaded.
        """
        if not is_url(self.path):
            return self.path
        return fetch(self.path, self.digest).path


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
    """Return the SHA-256 over name, size and number of samples of each file, in order, and over the
    content of files elsewhere."""
    digest = sha256()
    for name, file in zip(names, files, strict=True):
        # Names and sizes only: hashing the content would read the whole dataset at each start.
        # A file elsewhere was read as a whole when it was downloaded.
        digest_of_content = f"\0{file.digest}" if file.digest else ""
        line = f"{name}\0{file.size}\0{file.samples}{digest_of_content}\n"
        # surrogateescape, because names of files may be arbitrary bytes.
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def find_files(files: str | Sequence[str]) -> list[str]:
    """Return the files that match patterns, each once, sorted by name within a pattern.

    Args:
        files: paths of this machine or URLs. Both take `{a,b}` and `{000..099}`; paths and URLs of
            stores that list their objects take `*`, `?`, `[...]` and `**`.

    Raises:
        ValueError: a pattern matches no file.
        ConfigError: a store cannot list its files.
        RemoteError: it cannot be reached.
    """
    matches = []
    for pattern in [files] if isinstance(files, str) else files:
        paths = _match_pattern(strip_file_scheme(pattern))
        if not paths:
            raise ValueError(f"files = {pattern!r}: no file has this name or matches this pattern")
        matches += paths
    return list(dict.fromkeys(matches))


def _match_pattern(pattern: str) -> list[str]:
    if is_url(pattern):
        return [path for alternative in expand_braces(pattern) for path in list_urls(alternative)]
    # First as it is: a folder of this machine may have braces in its name.
    for patterns in ([pattern], expand_braces(pattern)):
        matches = [
            path
            for alternative in patterns
            for path in sorted(glob(alternative, recursive=True))  # noqa: PTH207 - `**` of any path
            if Path(path).is_file()
        ]
        if matches:
            return matches
    return []


def local_files(paths: Sequence[str]) -> list[str]:
    """Return the paths of files on this machine; those elsewhere are downloaded if need be."""
    return [fetch(path).path if is_url(path) else path for path in paths]


def name_in_folder(paths: Sequence[str]) -> list[str]:
    """Return the names of files below their common folder, also of URLs."""
    plain = [
        PurePosixPath(urlsplit(strip_secrets(path)).path) if is_url(path) else Path(path)
        for path in paths
    ]
    # Folders of both kinds have a common one only if all are absolute.
    if any(map(is_url, paths)):
        plain = [PurePosixPath(Path(path).absolute()) for path in plain]
    root = os.path.commonpath([path.parent for path in plain])
    return [str(path.relative_to(root)) for path in plain]


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
    entries = _read_index(index, kind, stride)
    shards = []
    for path in paths:
        if is_url(path):
            shards.append(_index_url(path, entries.get(strip_secrets(path)), places))
        else:
            shards.append(_index_path(path, entries.get(path), places))
    if index is not None and any(
        entries.get(shard.name) != _without_secrets(shard) for shard in shards
    ):
        content = {
            "format": FORMAT,
            "kind": kind,
            "stride": stride,
            "files": [_encode_file(shard) for shard in shards],
        }
        # A unique name and an atomic rename, because all ranks write the index at once.
        temporary = Path(f"{index}.tmp-{uuid4().hex[:8]}")
        temporary.write_text(json.dumps(content))
        temporary.replace(index)
    return tuple(shards)


def _index_path(path: str, known: IndexedFile | None, places: Places) -> IndexedFile:
    status = Path(path).stat()
    # Nanoseconds as an integer: the float st_mtime cannot hold them, and would miss quick rewrites.
    if known is not None and (known.size, known.time) == (status.st_size, status.st_mtime_ns):
        return known
    count, begins = places(path)
    return IndexedFile(path, status.st_size, status.st_mtime_ns, count, tuple(begins))


def _index_url(url: str, known: IndexedFile | None, places: Places) -> IndexedFile:
    digest = split_digest(url)[1]
    if known is not None and known.digest:
        if known.digest == digest:
            return replace(known, path=url)
        stat = stat_url(split_digest(url)[0])
        # Without an identity only the content tells whether the file is the same.
        if (
            not digest
            and stat.identity
            and (known.size, known.identity) == (stat.size, stat.identity)
        ):
            return replace(known, path=url)
    copy = fetch(url)
    if known is not None and known.digest == copy.digest:
        return replace(known, path=url, identity=copy.identity)
    try:
        count, begins = places(copy.path)
    except ValueError as error:
        # Users know the URL, and not the name of the copy.
        raise ValueError(str(error).replace(copy.path, redact_url(url))) from error
    return IndexedFile(url, copy.size, 0, count, tuple(begins), copy.identity, copy.digest)


def _without_secrets(file: IndexedFile) -> IndexedFile:
    return replace(file, path=file.name)


def _encode_file(file: IndexedFile) -> dict[str, Any]:
    content = asdict(_without_secrets(file))
    if not is_url(file.path):
        # As earlier versions wrote and read it.
        del content["identity"], content["digest"]
    return content


def _read_index(index: str | None, kind: str, stride: int) -> Mapping[str, IndexedFile]:
    if index is None or not Path(index).exists():
        return {}
    try:
        content = json.loads(Path(index).read_text())
        if (content["format"], content.get("kind"), content["stride"]) != (FORMAT, kind, stride):
            return {}
        return {
            entry["path"]: IndexedFile(**{**entry, "places": tuple(entry["places"])})
            for entry in content["files"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"index = {index!r}: not an index of {kind} ({error}); delete it, or use another file",
            code="data.invalid_index",
        ) from error
