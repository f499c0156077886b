"""Documents of text files, JSON lines and folders, in an order that depends on names alone."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from phasetrain.errors import ConfigError, did_you_mean

JSON_LINES = (".jsonl", ".ndjson")

Position = tuple[int, int]
"""Number of a file, and number of a document in it."""


@dataclass(frozen=True)
class InputFile:
    """A file with documents.

    Attributes:
        path: path of the file.
        name: its name below the input that was given, which is part of the digest of the inputs.
        size: size in bytes.
    """

    path: Path
    name: str
    size: int

    @property
    def is_json_lines(self) -> bool:
        """Whether each line is a JSON object with a document."""
        return Path(self.name.removesuffix(".gz")).suffix.lower() in JSON_LINES


def list_inputs(inputs: Sequence[str]) -> list[InputFile]:
    """Return the files of inputs in the given order; files of a folder are sorted by name.

    Hidden files and folders are left out.

    Raises:
        ConfigError: an input does not exist, or a folder has no files.
    """
    input_files = []
    for text_input in inputs:
        path = Path(text_input)
        if path.is_dir():
            names = sorted(
                str(file.relative_to(path))
                for file in path.rglob("*")
                if file.is_file() and not _is_hidden(file.relative_to(path))
            )
        elif path.is_file():
            names = [path.name]
        else:
            raise ConfigError(
                f"{text_input}: there is no such file or folder; expected text, .jsonl, or folders "
                "of them",
                code="tokens.no_input",
            )
        if not names:
            raise ConfigError(
                f"{text_input}: this folder has no files; expected text or .jsonl",
                code="tokens.no_input",
            )
        files = [path / name if path.is_dir() else path for name in names]
        input_files += [
            InputFile(file, name, file.stat().st_size)
            for file, name in zip(files, names, strict=True)
        ]
    return input_files


def read_documents(
    files: Sequence[InputFile], field: str, start: Position = (0, 0)
) -> Iterator[tuple[Position, bytes]]:
    """Yield the position after each document that is not empty, and its text as UTF-8.

    Args:
        files: the files in order.
        field: key of the text in JSON lines.
        start: position of the first document.

    Raises:
        ConfigError: a line is not a JSON object with a text under this key, or a compressed file is
            truncated or damaged.
        OSError: a file cannot be read.
    """
    first, skipped = start
    for number in range(first, len(files)):
        documents = _read_file(files[number], field)
        for index, document in enumerate(documents):
            if document and (number > first or index >= skipped):
                yield (number, index + 1), document


def _read_file(file: InputFile, field: str) -> Iterable[bytes]:
    try:
        with _open_input(file) as opened:
            if not file.is_json_lines:
                yield opened.read()
                return
            for number, line in enumerate(opened, 1):
                yield _parse_line(file, number, line, field)
    # Of gzip alone: the end of the file comes too early, or its content is something else.
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"{file.path}: this file is not complete gzip data: {error}; expected a file that "
            "`gzip -t` accepts; copy or download it again",
            code="tokens.invalid_input",
        ) from error


def _open_input(file: InputFile) -> BinaryIO:
    if file.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(file.path, "rb"))
    return file.path.open("rb")


def _parse_line(file: InputFile, number: int, line: bytes, field: str) -> bytes:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{file.path}: line {number} is not JSON: {error}; expected an object with a text "
            f"under {field!r}",
            code="tokens.invalid_input",
        ) from error
    if isinstance(content, dict) and isinstance(content.get(field), str):
        # JSON can name half of a surrogate pair, which UTF-8 cannot hold.
        return str(content[field]).encode(errors="replace")
    text_keys: list[str] = []
    if isinstance(content, dict):
        text_keys = [name for name, value in content.items() if isinstance(value, str)]
    near = did_you_mean(field, text_keys) or ";"
    raise ConfigError(
        f"{file.path}: line {number} has no text under {field!r}{near} texts are under "
        f"{', '.join(map(repr, text_keys)) or 'no key'}; name the key with --field",
        code="tokens.invalid_input",
    )


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
