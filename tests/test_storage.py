"""The door to files: operations are announced, new files are exclusive, and replacing is whole or not at all."""

import errno
import os
from hashlib import sha256
from pathlib import Path

import pytest

from phasetrain import storage
from phasetrain.storage import FileRecord, Storage, tree_digest


class Refusing:
    """Raises ENOSPC before the operation of a kind."""

    def __init__(self, refused: str) -> None:
        self.refused = refused

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.refused:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_each_operation_is_announced_in_order(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    door = Storage(before=lambda operation, path: seen.append((operation, Path(path).name.partition(".tmp-")[0])))
    door.make_folder(f"{tmp_path}/a")
    door.create(f"{tmp_path}/a/one", b"1")
    door.replace(f"{tmp_path}/a/two", b"2")
    door.rename(f"{tmp_path}/a", f"{tmp_path}/b")
    door.remove(f"{tmp_path}/b")
    assert seen == [
        ("make_folder", "a"),
        ("create", "one"), ("write", "one"), ("fsync", "one"),
        ("create", "two"), ("fsync", "two"), ("rename", "two"), ("fsync", "a"),
        ("rename", "b"),
        ("remove", "b"), ("remove", "one"), ("remove", "two"),
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_create_is_exclusive_and_hashes(tmp_path: Path) -> None:
    door, path = Storage(), f"{tmp_path}/file"
    leaf = sha256(b"abc").digest()
    assert door.create(path, b"abc") == FileRecord(3, sha256(leaf).hexdigest())
    with pytest.raises(FileExistsError):
        door.create(path, b"other")
    assert door.read(path) == b"abc"


def test_the_digest_is_a_tree_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree_digest(b"") == sha256(b"").hexdigest()
    monkeypatch.setattr(storage, "BLOCK", 2)
    leaves = [sha256(block).digest() for block in (b"ab", b"cd", b"e")]
    assert tree_digest(b"abcde") == sha256(b"".join(leaves)).hexdigest()


@pytest.mark.parametrize("operation", ["create", "fsync", "rename"])
def test_a_replace_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, operation: str) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        Storage(before=Refusing(operation)).replace(f"{tmp_path}/file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_replace_without_durability_does_not_sync(tmp_path: Path) -> None:
    Storage(before=Refusing("fsync")).replace(f"{tmp_path}/file", b"new", durable=False)
    assert (tmp_path / "file").read_bytes() == b"new"


def test_json(tmp_path: Path) -> None:
    door, path = Storage(), f"{tmp_path}/file.json"
    assert door.read_json(path) is None
    door.replace_json(path, {"a": [1, None]})
    assert door.read_json(path) == {"a": [1, None]}
    (tmp_path / "file.json").write_bytes(b'{"a": [1, nu')
    assert door.read_json(path) is None
    (tmp_path / "file.json").write_bytes(b"\xff\xfe")
    assert door.read_json(path) is None


def test_names_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    assert Storage().names(str(tmp_path)) == ["a", "b"]
    assert Storage().names(f"{tmp_path}/none") == []


def test_removing_what_is_gone_is_fine(tmp_path: Path) -> None:
    Storage().remove(f"{tmp_path}/none")


@pytest.mark.parametrize(("number", "accepted"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_sync_folders_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, accepted: bool
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if accepted:
        Storage().sync_folder(str(tmp_path))
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            Storage().sync_folder(str(tmp_path))
