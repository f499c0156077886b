"""The door to files: operations are announced, new files are exclusive, and replacing is whole or
not at all."""

import errno
import os
from hashlib import sha256
from pathlib import Path

import pytest
from failpoints import Refusing

from phasetrain.runtime.storage import (
    FileRecord,
    Storage,
    Unfinished,
    digest,
    posix,
    tree_digest,
)


def test_each_operation_is_announced_in_order(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    door = Storage(
        before=lambda operation, path: seen.append(
            (operation, Path(path).name.partition(".tmp-")[0])
        )
    )
    working = door.begin_folder(f"{tmp_path}/a")
    door.create(f"{working}/one", b"1")
    door.publish_folder(working, f"{tmp_path}/a")
    door.replace(f"{tmp_path}/a/two", b"2")
    door.read(f"{tmp_path}/a/two")
    door.read_hashed(f"{tmp_path}/a/one")
    door.log_file(f"{tmp_path}/a/log").close()
    door.remove(f"{tmp_path}/a")
    assert seen == [
        ("make_folder", "a"),
        ("create", "one"), ("write", "one"), ("fsync", "one"),
        ("fsync", "a"), ("rename", "a"), ("fsync", tmp_path.name),
        ("create", "two"), ("fsync", "two"), ("rename", "two"), ("fsync", "a"),
        ("read", "two"), ("read", "one"), ("open", "log"),
        ("remove", "a"), ("remove", "log"), ("remove", "one"), ("remove", "two"),
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


class TestDurable:
    """The kernel is asked to write, and after the bytes were handed to it."""

    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
        """Return a list of the files and folders that are fsynced: name, and content then."""
        found: list[tuple[str, bytes]] = []
        fsync = os.fsync

        def record(handle: int) -> None:
            path = Path(f"/proc/self/fd/{handle}").resolve()
            content = b"" if path.is_dir() else path.read_bytes()
            found.append((path.name.partition(".tmp-")[0], content))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", record)
        return found

    def test_replaced_file_is_synced_before_it_is_renamed(
        self, tmp_path: Path, synced: list[tuple[str, bytes]]
    ) -> None:
        renamed_after: list[int] = []

        def before(operation: str, path: str) -> None:
            if operation == "rename":
                renamed_after.append(len(synced))

        Storage(before).replace(f"{tmp_path}/file", b"new")
        assert (synced, renamed_after) == ([("file", b"new"), (tmp_path.name, b"")], [1])

    def test_replaced_file_that_need_not_last_is_not_synced(
        self, tmp_path: Path, synced: list[tuple[str, bytes]]
    ) -> None:
        Storage().replace(f"{tmp_path}/file", b"new", durable=False)
        assert synced == []

    def test_new_file_and_the_folder_of_its_name_are_synced(
        self, tmp_path: Path, synced: list[tuple[str, bytes]]
    ) -> None:
        storage = Storage()
        working = storage.begin_folder(f"{tmp_path}/folder")
        storage.create(f"{working}/file", b"content")
        storage.publish_folder(working, f"{tmp_path}/folder")
        assert synced == [("file", b"content"), ("folder", b""), (tmp_path.name, b"")]

    def test_log_is_synced_with_everything_that_was_written_to_it(
        self, tmp_path: Path, synced: list[tuple[str, bytes]]
    ) -> None:
        log = Storage().log_file(f"{tmp_path}/log")
        log.write(b"one\n")
        log.flush()
        assert synced == []
        log.write(b"two\n")
        log.sync()
        log.close()
        assert synced == [("log", b"one\ntwo\n")]


class TestCreate:
    def test_it_is_exclusive_and_hashes(self, tmp_path: Path) -> None:
        door, path = Storage(), f"{tmp_path}/file"
        leaf = sha256(b"abc").digest()
        assert door.create(path, b"abc") == FileRecord(3, sha256(leaf).hexdigest())
        with pytest.raises(FileExistsError):
            door.create(path, b"other")
        assert door.read(path) == b"abc"

    @pytest.mark.parametrize(
        "data", [b"", b"abcde", bytearray(b"abcd"), memoryview(b"abcdefgh").cast("H")]
    )
    def test_what_is_written_is_loaded_with_the_same_digest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | bytearray | memoryview
    ) -> None:
        monkeypatch.setattr(digest, "BLOCK", 2)
        record = Storage().create(f"{tmp_path}/file", data)
        content, found = Storage().read_hashed(f"{tmp_path}/file")
        assert (content, found) == (bytes(data), record.digest)
        assert record == FileRecord(len(bytes(data)), tree_digest(bytes(data)))
        content += b"may be written to"

    def test_it_is_given_up_between_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(digest, "BLOCK", 2)
        answers = iter([False, False, True])
        with pytest.raises(Unfinished):
            Storage().create(f"{tmp_path}/file", b"abcdefgh", give_up=lambda: next(answers))
        assert (tmp_path / "file").read_bytes() == b"abcd"  # whoever gives up takes the folder away

    def test_an_error_keeps_its_number_and_path(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No such file") as caught:
            Storage().create(f"{tmp_path}/none/file", b"x")
        assert (caught.value.errno, caught.value.filename) == (
            errno.ENOENT,
            f"{tmp_path}/none/file",
        )


class TestReplace:
    @pytest.mark.parametrize("operation", ["create", "fsync", "rename"])
    def test_a_failure_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, operation: str
    ) -> None:
        (tmp_path / "file").write_bytes(b"old")
        with pytest.raises(OSError, match="No space left"):
            Storage(before=Refusing(operation)).replace(f"{tmp_path}/file", b"new")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}

    def test_without_durability_it_does_not_sync(self, tmp_path: Path) -> None:
        Storage(before=Refusing("fsync")).replace(f"{tmp_path}/file", b"new", durable=False)
        assert (tmp_path / "file").read_bytes() == b"new"

    def test_a_link_is_replaced_and_what_it_leads_to_stays(self, tmp_path: Path) -> None:
        (tmp_path / "other").write_bytes(b"other")
        (tmp_path / "file").symlink_to("other")
        Storage().replace(f"{tmp_path}/file", b"new")
        assert ((tmp_path / "file").read_bytes(), (tmp_path / "other").read_bytes()) == (
            b"new",
            b"other",
        )

    def test_json(self, tmp_path: Path) -> None:
        door, path = Storage(), f"{tmp_path}/file.json"
        assert door.read_json(path) is None
        door.replace_json(path, {"a": [1, None]})
        assert door.read_json(path) == {"a": [1, None]}
        (tmp_path / "file.json").write_bytes(b'{"a": [1, nu')
        assert door.read_json(path) is None
        (tmp_path / "file.json").write_bytes(b"\xff\xfe")
        assert door.read_json(path) is None
        (tmp_path / "folder.json").mkdir()
        assert door.read_json(f"{tmp_path}/folder.json") is None


class TestFolders:
    def test_what_is_begun_exists_once_it_is_published(self, tmp_path: Path) -> None:
        door, final = Storage(), f"{tmp_path}/final"
        working = door.begin_folder(final)
        assert not door.exists(final)
        door.publish_folder(working, final)
        assert door.list_names(str(tmp_path)) == ["final"]
        door.delete_folder(final, "last")
        assert door.list_names(str(tmp_path)) == []

    @pytest.mark.parametrize("published", [False, True])
    def test_abandoning(self, tmp_path: Path, published: bool) -> None:
        door, final = Storage(), f"{tmp_path}/final"
        working = door.begin_folder(final)
        door.create(f"{working}/file", b"1")
        if published:
            door.publish_folder(working, final)
        door.abandon_folder(working, final)
        assert door.list_names(str(tmp_path)) == []

    def test_abandoning_takes_nothing_that_somebody_else_has_published(
        self, tmp_path: Path
    ) -> None:
        door, final = Storage(), f"{tmp_path}/final"
        working = door.begin_folder(final)
        door.create(f"{tmp_path}/final", b"somebody else's")
        door.abandon_folder(working, final)
        assert door.list_names(str(tmp_path)) == ["final"]

    def test_names_of_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "b").touch()
        (tmp_path / "a").touch()
        assert Storage().list_names(str(tmp_path)) == ["a", "b"]
        assert Storage().list_names(f"{tmp_path}/none") == []

    def test_the_size_of_a_file(self, tmp_path: Path) -> None:
        Storage().create(f"{tmp_path}/file", b"abc")
        assert Storage().file_size(f"{tmp_path}/file") == 3

    def test_free_bytes(self, tmp_path: Path) -> None:
        free = Storage().free_bytes(str(tmp_path))
        assert free is not None
        assert free > 0
        assert Storage().free_bytes(f"{tmp_path}/none") is None

    @pytest.mark.parametrize(
        ("number", "accepted"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)]
    )
    def test_a_file_system_that_cannot_sync_folders_is_accepted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, accepted: bool
    ) -> None:
        def refuse(handle: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", refuse)
        if accepted:
            Storage().sync_folder(str(tmp_path))
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                Storage().sync_folder(str(tmp_path))


class TestRemove:
    def test_removing_a_missing_path_changes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "other").touch()
        Storage().remove(f"{tmp_path}/none")
        assert [path.name for path in tmp_path.iterdir()] == ["other"]

    def test_links_go_and_what_they_lead_to_stays(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "precious").touch()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside", target_is_directory=True)
        (tmp_path / "folder" / "dangling").symlink_to("nowhere")
        (tmp_path / "folder" / "loop").symlink_to("loop")
        Storage().remove(f"{tmp_path}/folder")
        assert [path.name for path in tmp_path.rglob("*")] == ["outside", "precious"]

    def test_a_sweep_takes_what_was_begun_or_thrown_away_and_nothing_else(
        self, tmp_path: Path
    ) -> None:
        for name in (
            "a.tmp-0a1b2c3d",
            ".trash-a-0a1b2c3d",
            "a",
            "a.tmp-0a1b2c3d.txt",
            "a.tmp-short",
            "b.tmp-XYZWXYZW",
        ):
            (tmp_path / name).mkdir()
        left = Storage().delete_leftovers(str(tmp_path), lambda name: name == "a", "last")
        assert left == [".trash-a-0a1b2c3d", "a.tmp-0a1b2c3d"]
        assert Storage().list_names(str(tmp_path)) == [
            "a",
            "a.tmp-0a1b2c3d.txt",
            "a.tmp-short",
            "b.tmp-XYZWXYZW",
        ]


def test_file_that_another_thread_is_replacing_is_no_leftover(tmp_path: Path) -> None:
    def delete_before_rename(operation: str, path: str) -> None:
        if operation == "rename":
            deleted.extend(storage.delete_leftovers(str(tmp_path), lambda name: False, "last"))

    deleted: list[str] = []
    storage = Storage(delete_before_rename)
    (tmp_path / "old.tmp-0a1b2c3d").write_bytes(b"left")
    storage.replace(f"{tmp_path}/rechecked.json", b"new")
    assert deleted == ["old.tmp-0a1b2c3d"]
    assert storage.read(f"{tmp_path}/rechecked.json") == b"new"


def test_content_is_read_into_pieces_with_the_digest_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BLOCK", 4)
    (tmp_path / "file").write_bytes(b"abcdefghij")
    pieces = [memoryview(bytearray(size)) for size in (1, 6, 0, 3)]
    assert Storage().read_into(f"{tmp_path}/file", pieces) == tree_digest(b"abcdefghij")
    assert [bytes(piece) for piece in pieces] == [b"a", b"bcdefg", b"", b"hij"]


@pytest.mark.parametrize("content", [b"", b"abcd", b"abcdefghij"])
def test_file_is_hashed_without_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(digest, "BLOCK", 4)
    monkeypatch.setattr(posix, "READ_BYTES", 3)
    (tmp_path / "file").write_bytes(content)
    record = FileRecord(len(content), tree_digest(content))
    assert Storage().hash_file(f"{tmp_path}/file") == record


def test_a_file_that_is_shorter_than_the_memory_to_fill(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdefgh")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        Storage().read_into(f"{tmp_path}/file", [memoryview(bytearray(12))])
