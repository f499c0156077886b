"""Write texts as token files, resumable at any moment with equal bytes."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from phasetrain.addons.text.options import TokenizeOptions
from phasetrain.addons.text.tokenize.documents import (
    InputFile,
    Position,
    list_inputs,
    read_documents,
)
from phasetrain.addons.text.tokenize.train_bpe import train_bpe
from phasetrain.addons.text.tokens import (
    ByteCodec,
    LibraryCodec,
    Manifest,
    ShardRecord,
    TextCodec,
    TokenFiles,
    load_codec,
)
from phasetrain.addons.text.tokens.token_files import (
    BYTES_TABLE,
    MANIFEST,
    PROGRESS,
    read_manifest,
)
from phasetrain.addons.text.tokens.tokenizers import TOKENIZER_FILE, TokenArray
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import Storage

log = logging.getLogger(__name__)

BATCH_BYTES = 2**20
"""Bytes of text that are encoded together, by several threads."""


def tokenize(
    out: str,
    inputs: Sequence[str],
    options: TokenizeOptions | None = None,
    storage: Storage | None = None,
) -> Manifest:
    """Write the texts of files as token files, and return their manifest.

    A text file is a document, and so is each line of `.jsonl`; `.gz` is decompressed, and empty
    documents are left out. If the process is killed, the same call continues at the last complete
    shard and writes the same bytes; a finished folder is left as it is.

    Args:
        out: folder to write.
        inputs: text files, JSON lines, and folders of them.
        options: by default bytes.
        storage: access to files, for tests.

    Raises:
        ConfigError: an input does not exist or cannot be encoded, the folder has shards of other
            inputs or options, or it holds something else.
        OSError: a file cannot be read or written.
    """
    options = options or TokenizeOptions()
    storage = storage or Storage()
    files = list_inputs(inputs)
    source = digest_source(files, options)
    if Path(out, MANIFEST).exists():
        _check_source(out, read_manifest(out).source, source)
        # A kill may have come between the manifest and this.
        storage.remove(f"{out}/{PROGRESS}")
        return TokenFiles(out).manifest
    writer = _begin(out, source, storage)
    codec = _prepare_codec(out, files, options, storage)
    writer.write_shards(files, codec, options)
    return writer.finish(codec)


def digest_source(files: Sequence[InputFile], options: TokenizeOptions) -> str:
    """Return the SHA-256 over names and sizes of the inputs, the options, and the tokenizer."""
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = load_codec(options.tokenizer, options.end).digest
    content = {
        "files": [(file.name, file.size) for file in files],
        "options": {**asdict(options), "tokenizer": tokenizer},
    }
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_source(out: str, before: str, source: str) -> None:
    if before != source:
        raise ConfigError(
            f"{out}: its tokens were made from other inputs, or with another tokenizer or other "
            "options; delete the folder, or choose another one",
            code="tokens.other_source",
        )


def _begin(out: str, source: str, storage: Storage) -> "TokenWriter":
    """Return the writer of a folder, at the position that an earlier call has reached."""
    progress = storage.read_json(f"{out}/{PROGRESS}")
    if progress is not None and not progress["shards"] and progress["source"] != source:
        # Nothing is lost, so a command that failed may be corrected. Its tokenizer goes first: a
        # kill before the new progress leaves the state of a call that has written nothing.
        storage.delete_leftovers(out, lambda _name: False, MANIFEST)
        storage.remove(f"{out}/{TOKENIZER_FILE}")
        writer = TokenWriter(out, source, storage, [], (0, 0))
        writer.save_progress()
        return writer
    if progress is not None:
        _check_source(out, progress["source"], source)
        shards = [ShardRecord(**entry) for entry in progress["shards"]]
        log.info("%s: continues after %d shards", out, len(shards))
        # Files that were being written under temporary names when an earlier call was killed.
        storage.delete_leftovers(out, lambda _name: False, MANIFEST)
        file, document = progress["next"]
        return TokenWriter(
            out, source, storage, shards, (file, document), is_exact=progress["is_exact"]
        )
    storage.make_folder(out)
    writer = TokenWriter(out, source, storage, [], (0, 0))
    # A kill before the first file leaves nothing but files with temporary names.
    storage.delete_leftovers(out, lambda _name: False, MANIFEST)
    if names := storage.list_names(out):
        raise ConfigError(
            f"{out}: this folder has other files ({names[0]}); expected a new folder",
            code="tokens.not_empty",
        )
    writer.save_progress()
    return writer


def _prepare_codec(
    out: str, files: Sequence[InputFile], options: TokenizeOptions, storage: Storage
) -> TextCodec:
    """Return the tokenizer, and write its file into the folder."""
    path = f"{out}/{TOKENIZER_FILE}"
    codec: TextCodec
    if options.tokenizer is not None:
        codec = load_codec(options.tokenizer, options.end)
    elif options.train_bpe is None:
        codec = ByteCodec()
    elif storage.exists(path):
        # The file is complete, because it was renamed after its last byte.
        codec = load_codec(path)
    else:
        documents = (text for _, text in read_documents(files, options.field))
        codec = LibraryCodec(train_bpe(documents, options.train_bpe), source=path)
    if codec.content is not None and not storage.exists(path):
        storage.replace(path, codec.content)
    return codec


class TokenWriter:
    """Writes shards, and after each of them the position of the next one.

    Args:
        out: the folder.
        source: digest of inputs and options.
        storage: access to files.
        shards: shards that are complete.
        position: file and document at which the next shard begins.
        is_exact: whether the bytes per token add up in all documents so far.
    """

    def __init__(
        self,
        out: str,
        source: str,
        storage: Storage,
        shards: Sequence[ShardRecord],
        position: Position,
        *,
        is_exact: bool = True,
    ) -> None:
        self.out = out
        self.source = source
        self.storage = storage
        self.shards = list(shards)
        self.position = position
        self.is_exact = is_exact

    def save_progress(self) -> None:
        """Write the list of complete shards, from which a later call continues."""
        content = {
            "source": self.source,
            "shards": [asdict(shard) for shard in self.shards],
            "next": self.position,
            "is_exact": self.is_exact,
        }
        self.storage.replace_json(f"{self.out}/{PROGRESS}", content)

    def write_shards(
        self, files: Sequence[InputFile], codec: TextCodec, options: TokenizeOptions
    ) -> None:
        """Write the shards that are missing."""
        shard = _OpenShard(codec)
        for position, text, tokens in _encode(codec, files, options.field, self.position):
            shard.add(text, tokens)
            self.position = position
            # Decided after each document, so that shards do not depend on what is encoded together.
            if shard.tokens >= options.shard_tokens:
                self._write(shard)
                shard = _OpenShard(codec)
        if shard.tokens:
            self._write(shard)

    def finish(self, codec: TextCodec) -> Manifest:
        """Write the manifest, which makes the folder complete."""
        if not self.shards:
            raise ConfigError(
                f"{self.out}: the inputs have no text; expected at least one document",
                code="tokens.no_input",
            )
        table = codec.byte_counts if self.is_exact else None
        if table is not None:
            self.storage.replace(f"{self.out}/{BYTES_TABLE}", table.counts.tobytes())
        manifest = Manifest(
            dtype=choose_dtype(codec.vocabulary),
            vocabulary=codec.vocabulary,
            end=codec.end,
            tokenizer=codec.digest,
            source=self.source,
            bytes_table=None if table is None else table.digest,
            shards=tuple(self.shards),
        )
        self.storage.replace_json(f"{self.out}/{MANIFEST}", manifest.to_json())
        self.storage.remove(f"{self.out}/{PROGRESS}")
        return manifest

    def _write(self, shard: "_OpenShard") -> None:
        tokens, index = shard.to_bytes()
        name = f"shard-{len(self.shards):05}"
        self.storage.replace(f"{self.out}/{name}.tokens", tokens)
        self.storage.replace(f"{self.out}/{name}.documents", index)
        self.shards.append(
            ShardRecord(
                name,
                len(shard.ends),
                shard.tokens,
                shard.bytes,
                sha256(tokens).hexdigest(),
                sha256(index).hexdigest(),
            )
        )
        self.is_exact = self.is_exact and shard.is_exact
        self.save_progress()


class _OpenShard:
    """A shard in memory.

    Args:
        codec: the tokenizer.
    """

    def __init__(self, codec: TextCodec) -> None:
        self.tokens = 0
        self.bytes = 0
        self.ends: list[int] = []
        self.is_exact = codec.byte_counts is not None
        self._kind = np.dtype(choose_dtype(codec.vocabulary)).newbyteorder("<")
        self._codec = codec
        self._parts: list[Any] = []

    def add(self, text: bytes, tokens: TokenArray) -> None:
        """Append a document and its end."""
        counts = self._codec.byte_counts
        if counts is not None and int(counts.counts[tokens].sum()) != len(text):
            self.is_exact = False
        self._parts.append(np.append(tokens, self._codec.end).astype(self._kind))
        self.tokens += len(tokens) + 1
        self.bytes += len(text)
        self.ends.append(self.tokens)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Return the content of the files: tokens, and ends of documents."""
        return np.concatenate(self._parts).tobytes(), np.array(self.ends, dtype="<i8").tobytes()


def choose_dtype(vocabulary: int) -> Any:
    """Return the smallest type that holds all tokens: `uint16` or `uint32`."""
    if vocabulary <= 2**16:
        return "uint16"
    return "uint32"


def _encode(
    codec: TextCodec, files: Sequence[InputFile], field: str, start: tuple[int, int]
) -> Iterator[tuple[Position, bytes, TokenArray]]:
    """Yield the position after each document, its text, and its tokens."""
    waiting: list[tuple[Position, bytes]] = []
    size = 0
    for position, text in read_documents(files, field, start):
        waiting.append((position, text))
        size += len(text)
        if size >= BATCH_BYTES:
            yield from _encode_batch(codec, files, waiting)
            waiting = []
            size = 0
    yield from _encode_batch(codec, files, waiting)


def _encode_batch(
    codec: TextCodec, files: Sequence[InputFile], documents: Sequence[tuple[Position, bytes]]
) -> Iterator[tuple[Position, bytes, TokenArray]]:
    try:
        token_lists = codec.encode([text for _, text in documents])
    except UnicodeDecodeError as error:
        file, number = next(position for position, text in documents if not _is_utf8(text))
        raise ConfigError(
            f"{files[file].path}: document {number} is not UTF-8 ({error.reason}); convert it, or "
            "write bytes, without a tokenizer",
            code="tokens.invalid_input",
        ) from error
    for (position, text), tokens in zip(documents, token_lists, strict=True):
        yield position, text, tokens


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
