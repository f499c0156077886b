"""Files of tokens with an index of documents, as `phasetrain tokenize` writes them.

A folder holds, in version 1 of the format:

- `tokens.json`: the manifest, see `Manifest`;
- `shard-00000.tokens`, ...: tokens, little-endian unsigned integers of `dtype`, each document
  followed by the token `end`; no document is in two shards;
- `shard-00000.documents`, ...: end of each document in its shard, in tokens, little-endian int64;
- `tokenizer.json`: the tokenizer, unless tokens are bytes;
- `bytes.table`: bytes of text that each token represents, little-endian uint16, if that is exact.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from errno import EIO
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phasetrain.addons.text.byte_counts import ByteCounts
from phasetrain.addons.text.tokens.packing import TokenArray
from phasetrain.data.datasets.base import locate_part
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import fetch, is_url, strip_file_scheme
from phasetrain.runtime.storage.urls import redact_url

FORMAT = "phasetrain-tokens"
VERSION = 1
MANIFEST = "tokens.json"
PROGRESS = "progress.json"
"""File of a folder that is not complete yet."""

BYTES_TABLE = "bytes.table"

Verify = Literal["auto", "always", "never"]

VERIFIED_BYTES = 2**30
"""Bytes of tokens up to which `auto` reads all of them at the start, which takes about a second."""

CHUNK = 2**22
"""Tokens that are checked together."""


@dataclass(frozen=True)
class ShardRecord:
    """A shard as the manifest lists it.

    Attributes:
        name: name of its files without suffix.
        documents: number of documents.
        tokens: number of tokens, with the ends of documents.
        bytes: bytes of text.
        sha256: digest of the tokens.
        index_sha256: digest of the index of documents.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a folder of tokens.

    Attributes:
        dtype: `uint16` or `uint32`.
        vocabulary: number of different tokens.
        end: the token after each document.
        tokenizer: SHA-256 of the tokenizer.
        source: digest of inputs and options from which the tokens were made.
        bytes_table: SHA-256 of the bytes per token; None if tokens have no fixed number of bytes.
        shards: the shards in order.
    """

    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    end: int
    tokenizer: str
    source: str
    bytes_table: str | None
    shards: tuple[ShardRecord, ...]

    @property
    def documents(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all shards, with the ends of documents."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of text in all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `tokens.json`."""
        totals = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return {"format": FORMAT, "version": VERSION, **asdict(self), **totals}

    def digest(self) -> str:
        """Return the SHA-256 over the digests of the shards, in order."""
        return sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


class TokenFiles:
    """The tokens of a folder as one stream.

    Files are read at an offset, and nothing of them is kept: memory does not grow, and a file that
    is cut while a run reads it is an error, where a mapped file would end the process (SIGBUS).

    Args:
        path: the folder; of one elsewhere, a URL without query, files are downloaded into a cache
            when they are first read.
        verify: read all tokens now and compare digests and largest token: `always`, `never`, or
            `auto`, up to `VERIFIED_BYTES`. Sizes of files are always checked, and the digests of
            files elsewhere.

    Attributes:
        path: the folder.
        manifest: its manifest.
        tokens: number of tokens.

    Raises:
        ConfigError: the folder has no manifest, or a file is missing, of another size or changed.
    """

    def __init__(self, path: str, verify: Verify = "auto") -> None:
        self.path = strip_file_scheme(path).rstrip("/")
        self._shown = redact_url(self.path)
        self._files: dict[str, Path] = {}
        self.manifest = read_manifest(path)
        self.tokens = self.manifest.tokens
        self._width = np.dtype(self.manifest.dtype).itemsize
        self._begins = np.cumsum([0, *(shard.tokens for shard in self.manifest.shards)])
        self._check_sizes()
        if verify == "always" or (verify == "auto" and self.tokens * self._width <= VERIFIED_BYTES):
            for number in range(len(self.manifest.shards)):
                self._check_content(number)

    def read(self, begin: int, end: int) -> TokenArray:
        """Return the tokens from `begin` to `end`, int64 `(end - begin,)`.

        Raises:
            OSError: a file cannot be read, or has become shorter.
        """
        parts = []
        while begin < end:
            number, within = locate_part(self._begins, begin)
            count = min(end, int(self._begins[number + 1])) - begin
            parts.append(self._read_shard(number, within, count).astype(np.int64))
            begin += count
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def read_document_ends(self) -> NDArray[np.int64]:
        """Return the end of each document in the stream, in tokens, int64 `(documents,)`."""
        ends = [
            np.fromfile(self._file(shard, "documents"), dtype="<i8") + begin
            # The last of these sums is the number of all tokens, at which no shard begins.
            for shard, begin in zip(self.manifest.shards, self._begins, strict=False)
        ]
        return np.concatenate(ends).astype(np.int64)

    @cached_property
    def byte_counts(self) -> ByteCounts | None:
        """Bytes that each token represents; None if that is not exact."""
        if self.manifest.bytes_table is None:
            return None
        counts = ByteCounts(np.fromfile(_locate_file(self.path, BYTES_TABLE), dtype="<u2"))
        if counts.digest != self.manifest.bytes_table:
            raise ConfigError(
                f"path = {self._shown!r}: {BYTES_TABLE} has changed since it was written; "
                "write the folder again with phasetrain tokenize",
                code="tokens.changed_shard",
            )
        return counts

    def _read_shard(self, number: int, begin: int, count: int) -> NDArray[Any]:
        """Return `count` tokens of a shard from `begin` on, as they are stored."""
        path = self._file(self.manifest.shards[number], "tokens")
        # Opened for each read, which costs 20 us: no open files to share with workers, or to close.
        with path.open("rb", buffering=0) as file:
            file.seek(begin * self._width)
            content = file.read(count * self._width)
        if len(content) < count * self._width:
            raise OSError(EIO, "the file became shorter while it was read", str(path))
        return np.frombuffer(content, dtype=np.dtype(self.manifest.dtype).newbyteorder("<"))

    def _file(self, shard: ShardRecord, suffix: str) -> Path:
        name = f"{shard.name}.{suffix}"
        file = self._files.get(name)
        # Looked up again if the cache has deleted it; a few microseconds, where `fetch` takes more.
        if file is None or not file.exists():
            digest = shard.sha256 if suffix == "tokens" else shard.index_sha256
            file = self._files[name] = _locate_file(self.path, name, digest)
        return file

    def _check_sizes(self) -> None:
        # A file elsewhere is compared with its digest when it arrives.
        if is_url(self.path):
            return
        for shard in self.manifest.shards:
            sizes = {"tokens": shard.tokens * self._width, "documents": shard.documents * 8}
            for suffix, expected in sizes.items():
                file = self._file(shard, suffix)
                size = file.stat().st_size if file.exists() else None
                if size != expected:
                    state = "is missing" if size is None else f"has {size:,} bytes"
                    raise ConfigError(
                        f"path = {self._shown!r}: {file.name} {state}, expected {expected:,}; "
                        "copy it again, or write the folder again with phasetrain tokenize",
                        code="tokens.truncated",
                    )

    def _check_content(self, number: int) -> None:
        """Compare the digests of a shard, and its largest token with the vocabulary."""
        shard = self.manifest.shards[number]
        digest = sha256()
        largest = 0
        for at in range(0, shard.tokens, CHUNK):
            part = self._read_shard(number, at, min(CHUNK, shard.tokens - at))
            digest.update(part.data)
            largest = max(largest, int(part.max()))
        index = sha256(self._file(shard, "documents").read_bytes()).hexdigest()
        if largest >= self.manifest.vocabulary:
            raise ConfigError(
                f"path = {self._shown!r}: {shard.name}.tokens has token {largest}, and the "
                f"vocabulary has {self.manifest.vocabulary} tokens, so they go from 0 to "
                f"{self.manifest.vocabulary - 1}; write the folder again with the tokenizer that "
                "it names",
                code="tokens.outside_vocabulary",
            )
        if (digest.hexdigest(), index) != (shard.sha256, shard.index_sha256):
            raise ConfigError(
                f"path = {self._shown!r}: {shard.name} has changed since it was written (its "
                f"digest is {digest.hexdigest()[:12]}, in {MANIFEST} {shard.sha256[:12]}); copy it "
                "again, or write the folder again with phasetrain tokenize",
                code="tokens.changed_shard",
            )


def read_manifest(path: str) -> Manifest:
    """Return the manifest of a folder of tokens.

    Raises:
        ConfigError: there is none, or it is of another format or version.
    """
    file = _find_manifest(strip_file_scheme(path).rstrip("/"))
    try:
        return parse_manifest(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"path = {path!r}: {MANIFEST} is not a manifest of format {FORMAT}, version {VERSION} "
            f"({error}); write the folder again with phasetrain tokenize",
            code="tokens.invalid_manifest",
        ) from error


def _find_manifest(path: str) -> Path:
    shown = redact_url(path)
    try:
        file = _locate_file(path, MANIFEST)
    except ConfigError as error:
        if error.code != "remote.not_found":
            raise
        raise _no_manifest(shown) from error
    if file.exists():
        return file
    if Path(path, PROGRESS).exists():
        raise ConfigError(
            f"path = {shown!r}: phasetrain tokenize has not finished this folder; run the same "
            "command again",
            code="tokens.unfinished",
        )
    raise _no_manifest(shown)


def _no_manifest(path: str) -> ConfigError:
    return ConfigError(
        f"path = {path!r}: there is no {MANIFEST}; expected a folder written by phasetrain "
        "tokenize",
        code="tokens.no_manifest",
    )


def _locate_file(folder: str, name: str, digest: str = "") -> Path:
    """Return the path of a file on this machine; one from elsewhere is downloaded if need be."""
    if is_url(folder):
        return Path(fetch(f"{folder}/{name}", digest).path)
    return Path(folder, name)


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """Return a manifest from the content of its file.

    Raises:
        ValueError, KeyError, TypeError: it is of another format or version, or incomplete.
    """
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(f"it is of {content['format']} {content['version']}")
    return Manifest(
        dtype=content["dtype"],
        vocabulary=content["vocabulary"],
        end=content["end"],
        tokenizer=content["tokenizer"],
        source=content["source"],
        bytes_table=content["bytes_table"],
        shards=tuple(ShardRecord(**record) for record in content["shards"]),
    )
