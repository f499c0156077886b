"""The file of a packed model: a zip archive of uncompressed members, read without extracting it.

A file from elsewhere may be hostile, so the reader accepts nothing that `encode_archive` does not
write: no compression (there is no bomb without it), no folders and links, no hidden bytes.
"""

import io
import json
import re
import stat
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.storage import open_storage

FORMAT = "phasetrain-pack"
"""Entry `format` of the index, by which a packed model is recognized."""

VERSION = 1
"""Version of the format; raised if an older release could not read the file correctly."""

INDEX = "pack.json"
"""Name of the member with sizes and digests of the others."""

CARD = "card.json"
CARD_PAGE = "card.md"
CONFIG = "config.json"
TOKENIZER_FILE = "tokenizer.json"
EXAMPLE_TREE = "example.json"
EXAMPLE_TENSORS = "example.safetensors"
WEIGHTS = "weights.safetensors"

MEMBERS = frozenset(
    {CARD, CARD_PAGE, CONFIG, TOKENIZER_FILE, EXAMPLE_TREE, EXAMPLE_TENSORS, WEIGHTS}
)
"""Names of the members that the index describes."""

MAX_MEMBERS = 64

MAX_TEXT_BYTES = 2**24
"""Maximum size of a JSON or Markdown member."""

DATE = (1980, 1, 1, 0, 0, 0)
"""Date of all members, the first one that a zip file can hold: equal content, equal bytes."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")

_END_RECORD = struct.Struct("<4s4H2LH")

_UTF8_FLAG = 0x800

# What zipfile raises for damaged files, found with random changes of a valid one.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    ValueError,
    OverflowError,
    EOFError,
    OSError,
    RuntimeError,
    struct.error,
)


def encode_archive(index: Mapping[str, Any], members: Mapping[str, bytes | memoryview]) -> bytes:
    """Return the file of a packed model; equal arguments give equal bytes.

    Args:
        index: content of `pack.json`, without its own entries `format`, `version` and `files`.
        members: name -> content of the other members, in the order in which they are written.
    """
    records = {
        name: {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        for name, content in members.items()
    }
    # First, so that a reader of another release finds the version before anything else.
    whole = {"format": FORMAT, "version": VERSION, **index, "files": records}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {INDEX: encode_json(whole), **members}.items():
            info = zipfile.ZipInfo(name, DATE)
            info.create_system = 3  # Unix, whatever system writes it
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            with archive.open(info, "w", force_zip64=len(content) > zipfile.ZIP64_LIMIT) as member:
                member.write(content)
    return file.getvalue()


def encode_json(content: Any) -> bytes:
    """Return JSON text with a fixed layout."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Archive:
    """A packed model whose members are verified.

    Attributes:
        path: as the user named it.
        digest: SHA-256 of the whole file.
        index: content of `pack.json`.
        members: name -> content of the other members; views of one block of memory.
    """

    path: str
    digest: str
    index: Mapping[str, Any]
    members: Mapping[str, memoryview]

    def parse_json(self, name: str) -> Any:
        """Return the content of a JSON member.

        Raises:
            ConfigError: it is missing or malformed.
        """
        return _parse_json(self.path, name, self.find_member(name))

    def find_member(self, name: str) -> memoryview:
        """Return the content of a member.

        Raises:
            ConfigError: there is no such member.
        """
        if name not in self.members:
            raise make_damage_error(self.path, f"{name} is missing")
        return self.members[name]


def make_damage_error(path: str, reason: str) -> ConfigError:
    """Return the error about content that is not as it was packed."""
    return ConfigError(
        f"{path}: {reason}; the file was damaged or changed after it was packed: get it again",
        code="pack.damaged",
    )


def names_archive(path: str) -> bool:
    """Return whether a path names a file, and not the folder of a run; `pack` writes only names in
    .zip, so such a path means a file even if there is none."""
    storage = open_storage(path)
    if not storage.exists(path):
        return path.endswith(".zip")
    return not storage.list_names(path)


def read_archive(path: str) -> Archive:
    """Read and verify the file of a packed model.

    Raises:
        ConfigError: it is not a packed model (`pack.unreadable`), of a newer format (`pack.newer`),
            has content that no packed model has (`pack.unsafe`), or content that differs from its
            digests (`pack.damaged`).
    """
    storage = open_storage(path)
    if not storage.exists(path):
        folder, _, name = path.rpartition("/")
        near = did_you_mean(name, storage.list_names(folder or "."))
        raise ConfigError(
            f"{path!r}: there is no such file{near or '; expected a file of `phasetrain pack`'}",
            code="pack.unreadable",
        )
    try:
        size = storage.file_size(path)
        if size is None:
            content = bytearray(storage.read(path))
        else:
            content = bytearray(size)  # not twice in memory
            storage.read_into(path, [memoryview(content)])
    except OSError as error:
        raise ConfigError(
            f"{path!r}: cannot be read: {error}; expected a file of phasetrain pack",
            code="pack.unreadable",
        ) from error
    return parse_archive(path, content)


def parse_archive(path: str, content: bytearray) -> Archive:
    """Verify the content of a file, see `read_archive`."""
    view = memoryview(content)
    members = _split_members(path, view)
    if INDEX not in members:
        raise _make_foreign_error(path, f"it has no {INDEX}")
    index = _parse_json(path, INDEX, members.pop(INDEX))
    _check_format(path, index)
    _verify_members(path, index.get("files"), members)
    return Archive(path, sha256(view).hexdigest(), index, members)


def _check_format(path: str, index: Any) -> None:
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _make_foreign_error(path, f"{INDEX} has no entry format = {FORMAT!r}")
    version = index.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise make_damage_error(path, f"{INDEX}: version = {version!r}")
    if version > VERSION:
        raise ConfigError(
            f"{path}: version {version} of the format, and this release reads up to {VERSION}; it "
            f"was written by phasetrain {index.get('phasetrain')}: install that version or a newer "
            "one",
            code="pack.newer",
        )


def _make_foreign_error(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: {reason}; expected a file of `phasetrain pack`", code="pack.unreadable"
    )


def _make_unsafe_error(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: {reason}, which no file of `phasetrain pack` has; get the original file, which "
        "was not unpacked or compressed again",
        code="pack.unsafe",
    )


def _verify_members(path: str, records: Any, members: Mapping[str, memoryview]) -> None:
    if not isinstance(records, dict):
        raise make_damage_error(path, f"{INDEX} has no digests")
    # In both directions: a member without a digest could hold anything.
    for name in records.keys() - members.keys():
        raise make_damage_error(path, f"{name} is missing")
    for name in members.keys() - records.keys():
        raise make_damage_error(path, f"{name} has no digest in {INDEX}")
    for name in sorted(members.keys() - MEMBERS):
        raise _make_unsafe_error(path, f"it has a member named {name!r}")
    for name, content in members.items():
        expected = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        if records[name] != expected:
            raise make_damage_error(path, f"{name} does not have the digest that {INDEX} records")


def _parse_json(path: str, name: str, content: memoryview) -> Any:
    if len(content) > MAX_TEXT_BYTES:
        raise _make_unsafe_error(path, f"{name} has {len(content):,} bytes")
    try:
        return json.loads(bytes(content))
    # RecursionError: text that is nested too deeply
    except (ValueError, RecursionError) as error:
        raise make_damage_error(path, f"{name} is not JSON ({type(error).__name__})") from error


class _Memory(io.RawIOBase):
    """Reads memory as a file, without the copy that BytesIO would make."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        chunk = self._content[self._at : self._at + len(target)]
        target[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        if start + offset < 0:
            raise ValueError("a position before the start")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at


def _split_members(path: str, content: memoryview) -> dict[str, memoryview]:
    """Return name -> content of the members, in their order.

    Raises:
        ConfigError: it is not a zip file, or one that `encode_archive` would not write.
    """
    try:
        with zipfile.ZipFile(_Memory(content)) as archive:
            listed = archive.infolist()
            end = archive.start_dir
    except _ZIP_ERRORS as error:
        raise _make_foreign_error(path, f"it is not a readable zip file ({error})") from error
    # zipfile looks for the record in the last 64 KiB, and ignores what follows it.
    *_, comment_bytes = last = _END_RECORD.unpack(content[-_END_RECORD.size :])
    if last[0] != b"PK\x05\x06" or comment_bytes:
        raise _make_unsafe_error(path, "it has a comment, or bytes after its end")
    if len(listed) > MAX_MEMBERS:
        raise _make_unsafe_error(path, f"it has {len(listed)} members")
    members: dict[str, memoryview] = {}
    at = 0
    for info in sorted(listed, key=lambda member: member.header_offset):
        reason = _find_flaw(info)
        if reason or info.filename in members:
            raise _make_unsafe_error(path, reason or f"it has {info.filename!r} twice")
        # Each member begins where the one before ends: members that share bytes are the trick of
        # zip bombs, and bytes between them could hold anything.
        begin = _find_content(content, info)
        if info.header_offset != at or begin is None or begin + info.file_size > end:
            raise _make_unsafe_error(path, f"{info.filename} overlaps or follows unused bytes")
        at = begin + info.file_size
        members[info.filename] = content[begin:at]
    if at != end:
        raise _make_unsafe_error(path, "it has unused bytes after its members")
    return members


def _find_flaw(info: zipfile.ZipInfo) -> str:
    """Return the flaw of an entry in the directory of a zip file; empty without one."""
    # Not `filename`, from which zipfile has removed what follows a zero byte.
    name = info.orig_filename
    file_type = stat.S_IFMT(info.external_attr >> 16)
    if not _NAME.fullmatch(name):
        return f"it has a member named {name[:100]!r}"
    if file_type not in (0, stat.S_IFREG):
        return f"{name} is a link or another special file"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return f"{name} is compressed"
    if info.flag_bits & ~_UTF8_FLAG:
        return f"{name} is encrypted, or its size is unknown"
    if info.comment or info.extra != _encode_zip64(*_list_directory_numbers(info)):
        return f"{name} has a comment or an extra field"
    return ""


def _list_directory_numbers(info: zipfile.ZipInfo) -> list[int]:
    """Return the numbers of an entry that 32 bits do not hold, as zipfile writes them."""
    numbers = []
    if info.file_size > zipfile.ZIP64_LIMIT:
        numbers += [info.file_size, info.compress_size]
    if info.header_offset > zipfile.ZIP64_LIMIT:
        numbers.append(info.header_offset)
    return numbers


def _encode_zip64(*numbers: int) -> bytes:
    """Return the extra field with numbers of 64 bits; empty without any. It is the only field that
    `encode_archive` writes: others could hold anything."""
    if not numbers:
        return b""
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _find_content(content: memoryview, info: zipfile.ZipInfo) -> int | None:
    """Return where the content of a member begins; None if its header contradicts the directory of
    the file."""
    head = content[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
    if len(head) < _LOCAL_HEADER.size:
        return None
    # Programs differ in which of the two headers they believe, so both must say the same.
    signature, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
    begin = info.header_offset + _LOCAL_HEADER.size
    name = bytes(content[begin : begin + name_bytes])
    if signature != b"PK\x03\x04" or name != info.orig_filename.encode():
        return None
    begin += name_bytes
    is_large = info.file_size > zipfile.ZIP64_LIMIT
    extra = _encode_zip64(info.file_size, info.compress_size) if is_large else b""
    if bytes(content[begin : begin + extra_bytes]) != extra:
        return None
    return int(begin + extra_bytes)
