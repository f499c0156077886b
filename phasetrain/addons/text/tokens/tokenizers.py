"""Tokenizers: bytes, and files of the library `tokenizers`."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from phasetrain.addons.text.blocks import ByteTokenizer
from phasetrain.addons.text.byte_counts import ByteCounts
from phasetrain.addons.text.tokens.token_files import MANIFEST, read_manifest
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.storage import fetch, is_url, strip_file_scheme
from phasetrain.runtime.storage.urls import redact_url

if TYPE_CHECKING:
    from types import ModuleType

    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""Names under which tokenizers have the end of a document, in the order in which they are tried."""

TokenArray = NDArray[np.int64]


class TextCodec(Protocol):
    """Turns texts into tokens and back.

    Attributes:
        vocabulary: number of tokens.
        end: the token after each document.
        digest: SHA-256 of the tokenizer.
        content: its file; None for bytes.
        byte_counts: bytes that each token represents; None if a token has no fixed number of them.
    """

    vocabulary: int
    end: int
    digest: str
    content: bytes | None
    byte_counts: ByteCounts | None

    def encode(self, documents: Sequence[bytes]) -> list[TokenArray]:
        """Return the tokens of each document, UTF-8, without its end.

        Raises:
            ValueError: a document is not UTF-8, and the tokenizer needs text.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without ends of documents."""
        ...


class ByteCodec:
    """One token per byte, and 256 for the end of a document; see `TextCodec`."""

    vocabulary = ByteTokenizer.vocabulary
    end = ByteTokenizer.end
    digest = sha256(b"phasetrain bytes 1").hexdigest()
    content: bytes | None = None

    def __init__(self) -> None:
        # Read-only attributes of a protocol with a mutable one: set for each object.
        self.byte_counts: ByteCounts | None = ByteTokenizer.count_bytes()

    def encode(self, documents: Sequence[bytes]) -> list[TokenArray]:
        """Return the bytes of each document."""
        return [np.frombuffer(document, dtype=np.uint8).astype(np.int64) for document in documents]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes, with U+FFFD for invalid UTF-8."""
        return ByteTokenizer().decode(list(tokens))


class LibraryCodec:
    """A tokenizer of the library `tokenizers`, see `TextCodec`.

    Text that looks like a special token, such as `<|endoftext|>`, is encoded as ordinary text, so
    that no document can end another one.

    Args:
        content: content of its `tokenizer.json`.
        end: name or number of the token at the end of a document; None tries `END_NAMES`.
        source: where it comes from, for messages.

    Raises:
        ConfigError: the library is missing, the content is no tokenizer, or it has no such token.
    """

    def __init__(self, content: bytes, end: str | int | None = None, source: str = "") -> None:
        library = import_tokenizers()
        try:
            made = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"tokenizer = {source!r}: not a file of the library tokenizers ({error}); expected "
                "a tokenizer.json",
                code="tokens.invalid_tokenizer",
            ) from error
        # Truncation and padding belong to single batches of a model, and would cut documents.
        made.no_truncation()
        made.no_padding()
        made.encode_special_tokens = True
        self._tokenizer: Tokenizer = made
        self.content: bytes | None = content
        self.digest = sha256(content).hexdigest()
        # Ids may have gaps: the vocabulary has to hold the largest one.
        ids = made.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values()) + 1
        self.end = end if isinstance(end, int) else _find_end(ids, end, source)
        self.byte_counts = _count_bytes(content, ids, self.vocabulary)

    def encode(self, documents: Sequence[bytes]) -> list[TokenArray]:
        """Return the tokens of each document, UTF-8, without its end.

        Raises:
            ValueError: a document is not UTF-8.
        """
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens."""
        kept = [token for token in tokens if token != self.end]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))


def import_tokenizers() -> "ModuleType":
    """Return the library `tokenizers`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "a tokenizer.json is read with the library tokenizers, which is not installed; run: "
            'pip install "phasetrain[text]"',
            code="config.missing_library",
        ) from error
    return tokenizers


def load_codec(folder: str, end: str | int | None = None) -> TextCodec:
    """Return the tokenizer in a folder, or of a file; without a `tokenizer.json`, bytes.

    Args:
        folder: folder or file, or the URL of a folder of tokens or of a file `*.json`.
        end: name or number of the token at the end of a document; None: the one with which the
            folder was written, or a usual one.

    Raises:
        ConfigError: there is no such path, or it cannot be read.
    """
    folder = strip_file_scheme(folder)
    if is_url(folder):
        if end is None and not folder.endswith(".json"):
            end = read_manifest(folder).end
        copy = _fetch_tokenizer(folder)
        if copy is None:
            return ByteCodec()
        return LibraryCodec(Path(copy).read_bytes(), end, redact_url(folder))
    path = Path(folder)
    if path.is_dir():
        manifest = path / MANIFEST
        if end is None and manifest.exists():
            end = read_manifest(folder).end
        path = path / TOKENIZER_FILE
        if not path.exists():
            return ByteCodec()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"tokenizer = {str(path)!r}: cannot be read: {error}; expected a tokenizer.json",
            code="tokens.invalid_tokenizer",
        ) from error
    return LibraryCodec(content, end, str(path))


def _fetch_tokenizer(url: str) -> str | None:
    """Return the path of a copy; None for a folder of tokens that are bytes."""
    if url.endswith(".json"):
        return fetch(url).path
    try:
        return fetch(f"{url.rstrip('/')}/{TOKENIZER_FILE}").path
    except ConfigError as error:
        if error.code != "remote.not_found":
            raise
        return None


def _find_end(ids: dict[str, int], name: str | None, source: str) -> int:
    names = END_NAMES if name is None else (name,)
    for candidate in names:
        if candidate in ids:
            return ids[candidate]
    if name is not None:
        near = did_you_mean(name, ids)
        raise ConfigError(
            f"end = {name!r}: the tokenizer {source!r} has no such token{near}",
            code="tokens.no_end",
        )
    raise ConfigError(
        f"tokenizer = {source!r}: it has no token for the end of a document, such as "
        f"{', '.join(END_NAMES)}; name one of its tokens with --end",
        code="tokens.no_end",
    )


def _count_bytes(content: bytes, ids: dict[str, int], vocabulary: int) -> ByteCounts | None:
    """Return the bytes of each token of a byte-level tokenizer; None for another one.

    In a byte-level vocabulary (Radford et al. 2019), each character of a token represents a byte.
    """
    if b'"ByteLevel"' not in content:
        return None
    special = {token["content"] for token in json.loads(content).get("added_tokens", ())}
    counts = np.zeros(vocabulary, dtype=np.uint16)
    for name, number in ids.items():
        if name not in special:
            counts[number] = len(name)
    return ByteCounts(counts)
