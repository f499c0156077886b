"""The door to an object store: no rename, writes are whole, and the object written last vouches for
a folder."""

from pathlib import Path

import pytest
from failpoints import Objects, Refusing
from iopath.common.file_io import PathHandler
from raising import raises

from phasetrain.addons.remote.objects import ObjectStorage
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import (
    HANDLERS,
    FileRecord,
    Storage,
    Unfinished,
    open_storage,
    tree_digest,
)
from phasetrain.testing import MemoryHandler


@pytest.fixture
def place(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "place")


def is_folder(name: str) -> bool:
    return name.startswith("p")


class TestOpening:
    def test_a_path_of_this_machine(self, tmp_path: Path) -> None:
        assert type(open_storage(str(tmp_path))) is Storage
        assert open_storage("runs/x").keeps_files

    def test_a_path_of_a_registered_handler(self) -> None:
        found = open_storage("mem://runs/x")
        assert isinstance(found, ObjectStorage)
        assert not found.keeps_files

    def test_a_prefix_that_nobody_has_registered(self) -> None:
        with raises(ConfigError, key="RUN.dir", given="'mam://runs'", suggestion="mem") as caught:
            open_storage("mam://runs")
        assert "HANDLERS.register('mam')" in str(caught.value)

    def test_handlers_are_a_registry_of_iopath(self) -> None:
        assert HANDLERS["mem"] is MemoryHandler
        assert isinstance(HANDLERS["mem"](), PathHandler)


def test_each_operation_is_announced_in_order(place: Objects) -> None:
    seen: list[tuple[str, str]] = []
    door = place.storage(
        lambda operation, path: seen.append((operation, path.rpartition("/")[2].partition(".")[0]))
    )
    working = door.begin_folder(f"{place.path}/p1")
    door.create(f"{working}/one", b"1")
    door.publish_folder(working, f"{place.path}/p1")
    door.replace(f"{place.path}/two", b"2")
    door.read(f"{place.path}/two")
    door.read_hashed(f"{place.path}/p1/one")
    door.delete_folder(f"{place.path}/p1", "one")
    door.remove(f"{place.path}/two")
    assert seen == [
        ("write", "written"), ("create", "one"), ("write", "one"), ("remove", "written"),
        ("write", "two"), ("read", "two"), ("read", "one"),
        ("write", "written"), ("remove", "one"), ("remove", "written"),
        ("remove", "two"),
    ]  # fmt: skip
    assert place.content() == {}


class TestCreate:
    def test_it_is_exclusive_and_hashes(self, place: Objects) -> None:
        door, path = place.storage(), f"{place.path}/a"
        assert door.create(path, memoryview(b"abc")) == FileRecord(3, tree_digest(b"abc"))
        with pytest.raises(FileExistsError):
            door.create(path, b"other")
        content, digest = door.read_hashed(path)
        assert (content, digest) == (b"abc", tree_digest(b"abc"))
        content += b"may be written to"

    def test_giving_up(self, place: Objects) -> None:
        with pytest.raises(Unfinished):
            place.storage().create(f"{place.path}/a", b"abc", give_up=lambda: True)
        assert place.content() == {}


def test_replacing_is_whole_or_not_at_all(place: Objects) -> None:
    place.storage().replace(f"{place.path}/a", b"old")
    with pytest.raises(OSError, match="No space left"):
        place.storage(Refusing("write")).replace(f"{place.path}/a", b"new")
    assert place.content() == {"a": b"old"}
    place.storage().replace_json(f"{place.path}/a", [1])
    assert place.storage().read_json(f"{place.path}/a") == [1]
    assert place.storage().read_json(f"{place.path}/none") is None


class TestFolders:
    def test_they_are_marked_while_they_are_written(self, place: Objects) -> None:
        door, final = place.storage(), f"{place.path}/p1"
        assert door.begin_folder(final) == final
        [mark] = place.content()
        assert mark.startswith("p1/written.tmp-")
        door.create(f"{final}/last", b"")
        door.publish_folder(final, final)
        assert list(place.content()) == ["p1/last"]

    def test_a_mark_that_cannot_be_taken_away_waits_for_the_next_sweep(
        self, place: Objects
    ) -> None:
        door, final = place.storage(Refusing("remove")), f"{place.path}/p1"
        door.begin_folder(final)
        door.create(f"{final}/last", b"")
        door.publish_folder(final, final)
        assert len(place.content()) == 2
        assert place.storage().delete_leftovers(place.path, is_folder, "last") == []
        assert list(place.content()) == ["p1/last"]

    def test_a_sweep_deletes_marked_folders_that_nothing_vouches_for(self, place: Objects) -> None:
        mark = "written.tmp-0a1b2c3d"
        for path in (
            "p1/last",
            "p2/last",
            f"p2/{mark}",
            "p3/part",
            f"p3/{mark}",
            f"p4/{mark}",
            "p5/part",
            f"q/{mark}",
        ):
            place.objects[f"{place.path}/{path}"] = b""
        assert place.storage().delete_leftovers(place.path, is_folder, "last") == ["p3", "p4"]
        assert list(place.content()) == [
            "p1/last",
            "p2/last",
            "p5/part",
            f"q/{mark}",
        ]  # p5 was damaged, not left

    def test_discarding_begins_with_what_vouches(self, place: Objects) -> None:
        for name in ("a", "last", "z"):
            place.objects[f"{place.path}/p1/{name}"] = b""
        removed: list[str] = []

        def before(operation: str, path: str) -> None:
            if operation == "remove":
                removed.append(path.rpartition("/")[2].partition(".")[0])

        place.storage(before).delete_folder(f"{place.path}/p1", "last")
        assert removed == ["last", "a", "z", "written"]
        assert place.content() == {}

    def test_a_name_that_begins_as_another_is_another_folder(self, place: Objects) -> None:
        for name in ("p1/last", "p1-c2/last"):
            place.objects[f"{place.path}/{name}"] = b""
        place.storage().delete_folder(f"{place.path}/p1", "last")
        assert list(place.content()) == ["p1-c2/last"]


def test_nobody_tells_the_size_of_an_object(place: Objects) -> None:
    place.storage().replace(f"{place.path}/a", b"abc")
    assert place.storage().file_size(f"{place.path}/a") is None


def test_what_an_object_store_cannot_tell_or_do(place: Objects) -> None:
    door = place.storage()
    assert door.free_bytes(place.path) is None
    door.sync_folder(place.path)
    door.make_folder(place.path)
    assert door.list_names(place.path) == []
    with raises(ConfigError, key="RUN.dir"):
        door.local_path(f"{place.path}/log")
