"""The file of a packed model: equal bytes for equal content, and nothing else is accepted."""

import io
import json
import stat
import zipfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from phasetrain.addons.deploy.pack.archive import (
    DATE,
    INDEX,
    VERSION,
    encode_archive,
    encode_json,
    names_archive,
    read_archive,
)
from phasetrain.errors import ConfigError

MEMBERS = {"card.json": b'{"name": "a"}', "weights.safetensors": bytes(range(200))}
CONTENT = encode_archive({"phasetrain": "0.1.0"}, MEMBERS)


def write_zip(path: Path, members: dict[str | zipfile.ZipInfo, bytes], method: int = 0) -> Path:
    """Write a zip file with the index that fits its members."""
    names = [one if isinstance(one, str) else one.filename for one in members]
    records = {
        name: {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        for name, content in zip(names, members.values(), strict=True)
    }
    index = {"format": "phasetrain-pack", "version": 1, "files": records}
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(zipfile.ZipInfo(INDEX, DATE), encode_json(index))
        for info, content in members.items():
            archive.writestr(info, content)
    return path


def test_members_and_digest_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(CONTENT)
    found = read_archive(str(tmp_path / "a.zip"))
    assert {name: bytes(content) for name, content in found.members.items()} == MEMBERS
    assert found.digest == sha256(CONTENT).hexdigest()
    assert found.parse_json("card.json") == {"name": "a"}
    assert found.index["version"] == VERSION == 1
    with raises(ConfigError, code="pack.damaged"):
        found.find_member("example.json")


def test_equal_content_gives_equal_bytes_without_dates_or_compression() -> None:
    assert encode_archive({"phasetrain": "0.1.0"}, MEMBERS) == CONTENT
    infos = zipfile.ZipFile(io.BytesIO(CONTENT)).infolist()
    assert [one.filename for one in infos] == [INDEX, *MEMBERS]
    assert {one.date_time for one in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert {one.compress_type for one in infos} == {zipfile.ZIP_STORED}
    assert {stat.filemode(one.external_attr >> 16) for one in infos} == {"-rw-r--r--"}
    assert sha256(CONTENT).hexdigest().startswith("af9bc96250e4")


@pytest.mark.feature("pack.no_code")
def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    weights = CONTENT.index(MEMBERS["weights.safetensors"])
    for at in (*range(0, len(CONTENT), 7), weights, weights + 199):
        content = bytearray(CONTENT)
        content[at] ^= 1
        path.write_bytes(content)
        with suppress(ConfigError):
            found = read_archive(str(path))
            # dates and checksums of the zip format, which nothing relies on
            assert {name: bytes(one) for name, one in found.members.items()} == MEMBERS
            assert found.digest != sha256(CONTENT).hexdigest()
    content = bytearray(CONTENT)
    content[weights] ^= 1
    path.write_bytes(content)
    with raises(ConfigError, code="pack.damaged"):
        read_archive(str(path))


def test_every_shorter_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    for size in range(0, len(CONTENT), 41):
        path.write_bytes(CONTENT[:size])
        with pytest.raises(ConfigError) as caught:
            read_archive(str(path))
        assert caught.value.code in ("pack.unreadable", "pack.unsafe", "pack.damaged")


def _write_named(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_zip(path, {name: b"x"})

    return write


def _write_link(path: Path) -> None:
    info = zipfile.ZipInfo("weights.safetensors", DATE)
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    write_zip(path, {info: b"/etc/passwd"})


def _write_bomb(path: Path) -> None:
    write_zip(path, {"weights.safetensors": bytes(10**7)}, zipfile.ZIP_DEFLATED)


def _write_many(path: Path) -> None:
    write_zip(path, {f"member{number}": b"" for number in range(100)})


def _write_twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.json", b"one")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.json", b"two")


def _write_prefixed(path: Path) -> None:
    path.write_bytes(b"#!/bin/sh\nrm -r ~\n" + CONTENT)


def _write_overlapping(path: Path) -> None:
    """Let two entries of the directory share the bytes of one member, as zip bombs do."""
    write_zip(path, {"a": b"1234", "b": b"1234"})
    content = path.read_bytes()
    first = content.index(b"PK\x01\x02")
    entries = content[first:].split(b"PK\x01\x02")[1:]
    offset_of_a = entries[1][38:42]
    entries[2] = entries[2][:38] + offset_of_a + entries[2][42:]
    path.write_bytes(content[:first] + b"".join(b"PK\x01\x02" + one for one in entries))


def _write_hidden(path: Path) -> None:
    """Put bytes between the members and the directory, which unpacking would not show."""
    content = path.read_bytes() if path.exists() else CONTENT
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    moved = int.from_bytes(content[end + 16 : end + 20], "little") + 8
    tail = content[end : end + 16] + moved.to_bytes(4, "little") + content[end + 20 :]
    path.write_bytes(content[:start] + b"HIDDEN!!" + content[start:end] + tail)


def _write_after(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(CONTENT + content)

    return write


def _write_comment(path: Path) -> None:
    path.write_bytes(CONTENT)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"HIDDEN"


def _write_member_comment(path: Path) -> None:
    info = zipfile.ZipInfo("weights.safetensors", DATE)
    info.comment = b"HIDDEN"
    write_zip(path, {info: b"x"})


def _write_extra(path: Path) -> None:
    info = zipfile.ZipInfo("weights.safetensors", DATE)
    info.extra = b"\x55\x55\x06\x00HIDDEN"
    write_zip(path, {info: b"x"})


def _write_local_extra(path: Path) -> None:
    """Put an extra field in the header of a member, and not in the directory."""
    _write_extra(path)
    content = path.read_bytes()
    entry = content.rindex(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    head = content[entry : entry + 30] + bytes(2) + content[entry + 32 : end - 10]
    size = (len(content[content.index(b"PK\x01\x02") : end]) - 10).to_bytes(4, "little")
    tail = content[end : end + 12] + size + content[end + 16 :]
    path.write_bytes(content[:entry] + head + tail)


@pytest.mark.feature("pack.no_code")
@pytest.mark.parametrize(
    "write",
    [
        _write_named("../evil.json"),
        _write_named("/etc/passwd"),
        _write_named("folder/file.json"),
        _write_named("C:\\evil"),
        _write_named(".hidden"),
        _write_named("a" * 101),
        _write_link,
        _write_bomb,
        _write_many,
        _write_twice,
        _write_prefixed,
        _write_overlapping,
        _write_hidden,
        _write_after(bytes(60_000)),
        _write_after(b"junk"),
        _write_comment,
        _write_member_comment,
        _write_extra,
        _write_local_extra,
    ],
)
def test_content_that_no_pack_has_is_rejected(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "a.zip"
    write(path)
    with raises(ConfigError, code="pack.unsafe"):
        read_archive(str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("name", ["evil.pkl", "code.py", "model.json"])
def test_indexed_member_of_another_name_is_rejected(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(encode_archive({}, {**MEMBERS, name: b"{}"}))
    with raises(ConfigError, code="pack.unsafe"):
        read_archive(str(path))


def test_members_with_numbers_of_64_bits_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a file above 2 GiB, whose extra fields hold sizes and positions.
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    content = encode_archive({}, {**MEMBERS, "example.json": b"{}"})
    (tmp_path / "a.zip").write_bytes(content)
    found = read_archive(str(tmp_path / "a.zip"))
    assert bytes(found.members["weights.safetensors"]) == MEMBERS["weights.safetensors"]
    assert bytes(found.members["example.json"]) == b"{}"
    monkeypatch.undo()
    with raises(ConfigError, code="pack.unsafe"):
        read_archive(str(tmp_path / "a.zip"))


def test_the_writer_of_these_tests_is_accepted_without_a_flaw(tmp_path: Path) -> None:
    found = read_archive(str(write_zip(tmp_path / "a.zip", {"weights.safetensors": b"x"})))
    assert bytes(found.members["weights.safetensors"]) == b"x"


def change_index(**entries: Any) -> bytes:
    """Return the file with other entries in its index."""
    records = {
        name: {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        for name, content in MEMBERS.items()
    }
    index = {"format": "phasetrain-pack", "version": 1, "files": records, **entries}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {INDEX: json.dumps(index).encode(), **MEMBERS}.items():
            archive.writestr(zipfile.ZipInfo(name, DATE), content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ({"version": 2, "phasetrain": "0.9"}, "pack.newer"),
        ({"version": 0}, "pack.damaged"),
        ({"version": True}, "pack.damaged"),
        ({"format": "something"}, "pack.unreadable"),
        ({"files": []}, "pack.damaged"),
        ({"files": {}}, "pack.damaged"),
        ({"files": {"missing.json": {"bytes": 1, "sha256": ""}}}, "pack.damaged"),
    ],
)
def test_index_that_does_not_fit_is_rejected(
    entries: dict[str, Any], code: str, tmp_path: Path
) -> None:
    (tmp_path / "a.zip").write_bytes(change_index(**entries))
    with raises(ConfigError, code=code):
        read_archive(str(tmp_path / "a.zip"))


def test_text_that_is_deeply_nested_or_too_long_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    for content, code in ((b"[" * 10**5, "pack.damaged"), (b" " * (2**24 + 1), "pack.unsafe")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo(INDEX, DATE), content)
        with raises(ConfigError, code=code):
            read_archive(str(path))


def test_other_files_are_no_packed_models(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"nothing")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("notes.txt", b"x")
    for name in ("a.zip", "b.zip", "missing.zip"):
        with raises(ConfigError, code="pack.unreadable"):
            read_archive(str(tmp_path / name))
    assert names_archive(str(tmp_path / "a.zip"))
    assert not names_archive(str(tmp_path))
    assert names_archive(str(tmp_path / "missing.zip"))
    assert not names_archive(str(tmp_path / "missing"))
