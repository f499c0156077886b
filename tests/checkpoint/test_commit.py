"""A checkpoint exists whole or not at all, whatever operation the process dies at or the disk refuses."""

import errno
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from phasetrain.checkpoint import commit as protocol
from phasetrain.checkpoint.commit import (
    Manifest,
    commit,
    committed,
    discard,
    folder_name,
    read_files,
    read_manifest,
    sweep,
)
from phasetrain.errors import InvalidCheckpointError
from phasetrain.state import RunState
from phasetrain.storage import FileRecord, Storage, tree_digest

FIRST, SECOND = RunState(1, 0, 5, 50), RunState(1, 1, 5, 50)
CONTENTS = {"tensors.safetensors": b"weights" * 9, "state.json": b"{}"}


class Died(BaseException):
    """The process is gone: no handler of the package takes it."""


class Failpoint:
    """Raises before the operation of a number, from 0; counts them."""

    def __init__(self, number: int | None, error: Callable[[str], BaseException] = Died) -> None:
        self.number, self.error, self.seen = number, error, 0

    def __call__(self, operation: str, path: str) -> None:
        if self.seen == self.number:
            self.seen += 1
            raise self.error(path)
        self.seen += 1


def full_disk(path: str) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", path)


def write(
    root: Path, state: RunState, before: Failpoint | None = None, *, sequence: int = 1, data: bytes = b"weights" * 9
) -> protocol.Saved:
    contents = CONTENTS | {"tensors.safetensors": data}
    return commit(Storage(before), str(root), state, contents, sequence=sequence, run="r", parent=None)


def whole(root: Path) -> list[str]:
    """Return `name: weights` of every checkpoint that is listed, after reading all of its files."""
    found, rejected = committed(Storage(), str(root))
    assert rejected == {}
    texts = []
    for saved in found:
        contents = read_files(Storage(), f"{root}/{saved.name}", saved.manifest, "full")
        assert contents.keys() == CONTENTS.keys()
        texts.append(f"{saved.name}: {contents['tensors.safetensors'].decode()[:7]}")
    return texts


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def operations(act: Callable[[Path, Failpoint], Any], root: Path) -> int:
    """Return how many operations an act takes."""
    counter = Failpoint(None)
    act(root, counter)
    assert counter.seen > 1
    return counter.seen


def test_a_committed_checkpoint(tmp_path: Path) -> None:
    saved = write(tmp_path, FIRST)
    assert saved.name == "p0001-s00000000"
    assert names(tmp_path / saved.name) == ["manifest.json", "state.json", "tensors.safetensors"]
    manifest = read_manifest(Storage(), f"{tmp_path}/{saved.name}")
    assert manifest == saved.manifest
    assert manifest.state == {"phase": 1, "step": 0, "updates": 5, "samples": 50, "finished": ""}
    assert (manifest.order, manifest.files["state.json"].size) == ((1, 0, 1), 2)


def test_folder_names_sort_like_positions() -> None:
    assert folder_name(RunState(3, 17)) == "p0003-s00000017"
    assert folder_name(RunState(12345, 123456789)) == "p12345-s123456789"


def test_checkpoints_are_ordered_by_position_then_sequence_and_never_by_time(tmp_path: Path) -> None:
    for sequence, state in enumerate([RunState(10, 0), RunState(2, 100), RunState(2, 9), RunState(12345, 0)]):
        write(tmp_path, state, sequence=sequence)
    (tmp_path / "latest").write_text("p0002-s00000009")
    (tmp_path / "notes").mkdir()
    found, rejected = committed(Storage(), str(tmp_path))
    assert [saved.manifest.order[:2] for saved in found] == [(2, 9), (2, 100), (10, 0), (12345, 0)]
    assert rejected == {}


class TestDying:
    """Die before every operation of an act; afterwards the old or the new is there, whole, and a sweep leaves that."""

    def check(self, tmp_path: Path, prepare: Any, act: Any, outcomes: list[list[str]]) -> None:
        prepare(tmp_path / "count")
        count = operations(act, tmp_path / "count")
        seen = []
        for number in range(count):
            root = tmp_path / str(number)
            prepare(root)
            with pytest.raises(Died):
                act(root, Failpoint(number))
            swept_names = sweep(Storage(), str(root))
            assert not any(name.startswith("p") and ".tmp-" not in name for name in swept_names)
            assert whole(root) in outcomes
            assert names(root) == [text.partition(":")[0] for text in whole(root)]
            seen.append(whole(root))
            write(root, RunState(9, 9), sequence=9, data=b"further")
            assert whole(root)[-1] == "p0009-s00000009: further"
        assert sorted(outcomes, key=seen.index) == outcomes  # each was met, the old ones first

    def test_the_first_commit(self, tmp_path: Path) -> None:
        self.check(
            tmp_path,
            prepare=lambda root: root.mkdir(),
            act=lambda root, before: write(root, FIRST, before),
            outcomes=[[], ["p0001-s00000000: weights"]],
        )

    def test_the_second_commit(self, tmp_path: Path) -> None:
        first = "p0001-s00000000: weights"
        self.check(
            tmp_path,
            prepare=lambda root: write(root, FIRST),
            act=lambda root, before: write(root, SECOND, before, sequence=2),
            outcomes=[[first], [first, "p0001-s00000001: weights"]],
        )

    def test_a_commit_of_the_same_position(self, tmp_path: Path) -> None:
        self.check(
            tmp_path,
            prepare=lambda root: write(root, FIRST),
            act=lambda root, before: write(root, FIRST, before, sequence=2, data=b"another"),
            outcomes=[["p0001-s00000000: weights"], ["p0001-s00000000: another"]],
        )

    def test_a_deletion(self, tmp_path: Path) -> None:
        self.check(
            tmp_path,
            prepare=lambda root: write(root, FIRST),
            act=lambda root, before: discard(Storage(before), str(root), "p0001-s00000000"),
            outcomes=[["p0001-s00000000: weights"], []],
        )

    def test_a_sweep(self, tmp_path: Path) -> None:
        def prepare(root: Path) -> None:
            write(root, FIRST)
            (root / "p0001-s00000000").rename(root / ".aside-p0001-s00000000-0a1b2c3d")
            write(root, SECOND)
            (root / "p0001-s00000001").rename(root / ".trash-p0001-s00000001-0a1b2c3d")
            (root / "p0002-s00000000.tmp-0a1b2c3d").mkdir()
            (root / "p0002-s00000000.tmp-0a1b2c3d" / "tensors.safetensors").touch()

        self.check(
            tmp_path,
            prepare=prepare,
            act=lambda root, before: sweep(Storage(before), str(root)),
            outcomes=[["p0001-s00000000: weights"]],
        )


def in_place(storage: Storage, root: str, state: RunState, contents: Any, **known: Any) -> protocol.Saved:
    """Overwrite the checkpoint of the same position file by file."""
    final = f"{root}/{folder_name(state)}"
    storage.remove(final)
    storage.make_folder(final)
    files = {name: storage.create(f"{final}/{name}", data) for name, data in contents.items()}
    manifest = Manifest(1, files=files, state=state.state_dict(), **known)
    storage.create(f"{final}/manifest.json", manifest.encode())
    return protocol.Saved(folder_name(state), manifest)


def manifest_first(storage: Storage, root: str, state: RunState, contents: Any, **known: Any) -> protocol.Saved:
    """Write the manifest before the files of which it speaks."""
    final = f"{root}/{folder_name(state)}"
    storage.make_folder(final)
    files = {name: FileRecord(len(data), tree_digest(data)) for name, data in contents.items()}
    manifest = Manifest(1, files=files, state=state.state_dict(), **known)
    storage.create(f"{final}/manifest.json", manifest.encode())
    for name, data in contents.items():
        storage.create(f"{final}/{name}", data)
    return protocol.Saved(folder_name(state), manifest)


def renamed_early(storage: Storage, root: str, state: RunState, contents: Any, **known: Any) -> protocol.Saved:
    """Rename before the last file is written."""
    final, temporary = f"{root}/{folder_name(state)}", f"{root}/{folder_name(state)}.tmp-0a1b2c3d"
    storage.make_folder(temporary)
    files = {name: FileRecord(len(data), tree_digest(data)) for name, data in contents.items()}
    manifest = Manifest(1, files=files, state=state.state_dict(), **known)
    storage.create(f"{temporary}/manifest.json", manifest.encode())
    storage.rename(temporary, final)
    for name, data in contents.items():
        storage.create(f"{final}/{name}", data)
    return protocol.Saved(folder_name(state), manifest)


@pytest.mark.parametrize(
    ("broken", "caught"),
    [(protocol.commit, False), (in_place, True), (manifest_first, True), (renamed_early, True)],
)
def test_the_enumeration_catches_protocols_that_are_not_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, caught: bool
) -> None:
    monkeypatch.setattr(f"{__name__}.commit", broken)
    found = False
    try:
        TestDying().test_the_second_commit(tmp_path)
    except (AssertionError, InvalidCheckpointError):
        found = True
    assert found is caught


@pytest.mark.parametrize("again", [False, True], ids=["new position", "same position"])
def test_a_disk_that_refuses_any_operation_leaves_nothing_and_takes_nothing(tmp_path: Path, again: bool) -> None:
    state = FIRST if again else SECOND
    write(tmp_path / "count", FIRST)
    count = operations(lambda root, before: write(root, state, before, sequence=2, data=b"another"), tmp_path / "count")
    for number in range(count):
        root = tmp_path / str(number)
        write(root, FIRST)
        with pytest.raises(OSError, match="No space left on device"):
            write(root, state, Failpoint(number, full_disk), sequence=2, data=b"another")
        assert whole(root) == ["p0001-s00000000: weights"]
        assert names(root) == ["p0001-s00000000"]


def test_a_sweep_deletes_the_one_aside_once_its_successor_is_there(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    write(tmp_path, FIRST, sequence=2, data=b"another")
    assert [name[:22] for name in sweep(Storage(), str(tmp_path))] == [".aside-p0001-s00000000"]
    assert whole(tmp_path) == ["p0001-s00000000: another"]


class TestDamage:
    """Whatever happens to the bytes of a checkpoint is noticed before they are used."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / write(tmp_path, FIRST).name

    def reason(self, folder: Path, verify: protocol.Verify = "full") -> str:
        with pytest.raises(InvalidCheckpointError) as caught:
            read_files(Storage(), str(folder), read_manifest(Storage(), str(folder)), verify)
        return str(caught.value)

    def test_every_flipped_bit_of_the_manifest(self, folder: Path) -> None:
        sound = (folder / "manifest.json").read_bytes()
        unseen = []
        for at, bit in itertools.product(range(len(sound)), range(8)):
            try:
                Manifest.decode(sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :])
            except InvalidCheckpointError:
                continue
            unseen.append((at, bit))
        assert unseen == []
        assert Manifest.decode(sound).sequence == 1

    def test_flipped_bits_of_the_other_files(self, folder: Path) -> None:
        generator = random.Random(0)
        for name, data in CONTENTS.items():
            for _ in range(20):
                at, bit = generator.randrange(len(data)), generator.randrange(8)
                (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
                assert self.reason(folder).startswith(f"{name} has digest")
            (folder / name).write_bytes(data)
        assert whole(folder.parent) == ["p0001-s00000000: weights"]

    def test_every_truncation(self, folder: Path) -> None:
        for name in (*CONTENTS, "manifest.json"):
            data = (folder / name).read_bytes()
            for size in range(0, len(data), 7):
                (folder / name).write_bytes(data[:size])
                assert self.reason(folder, "size").startswith(name)
            (folder / name).write_bytes(data)

    @pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
    def test_a_missing_file(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        assert self.reason(folder, "off") == f"{name} cannot be read (No such file or directory)"

    def test_size_alone_is_checked_where_that_is_asked_for(self, folder: Path) -> None:
        (folder / "state.json").write_bytes(b"[]")
        manifest = read_manifest(Storage(), str(folder))
        assert read_files(Storage(), str(folder), manifest, "size")["state.json"] == b"[]"
        (folder / "state.json").write_bytes(b"[] ")
        assert read_files(Storage(), str(folder), manifest, "off")["state.json"] == b"[] "
        assert self.reason(folder, "size") == "state.json has 3 bytes, the manifest says 2"

    def test_a_folder_without_a_manifest_is_listed_as_rejected(self, folder: Path) -> None:
        (folder / "manifest.json").unlink()
        assert committed(Storage(), str(folder.parent)) == (
            [],
            {"p0001-s00000000": "manifest.json cannot be read (No such file or directory)"},
        )


class TestHostileManifests:
    SOUND = Manifest(1, 1, "r", None, FIRST.state_dict(), {"a": FileRecord(1, "0")})

    def refused(self, body: Any) -> str:
        digest = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        with pytest.raises(InvalidCheckpointError) as caught:
            Manifest.decode(json.dumps({"body": body, "digest": digest}).encode())
        return str(caught.value)

    def test_the_sound_one_is_read(self) -> None:
        assert Manifest.decode(self.SOUND.encode()) == self.SOUND

    @pytest.mark.parametrize(
        "name",
        ["../state.json", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\\b", "a\n", "a\0", "C:x", "file://x"],
    )
    def test_names_that_lead_out_of_the_folder(self, name: str) -> None:
        body = asdict(self.SOUND) | {"files": {name: {"size": 1, "digest": "0"}}}
        assert self.refused(body) == f"manifest.json names the file {name!r}, which is no plain file name"

    def test_a_later_format(self) -> None:
        assert self.refused(asdict(replace(self.SOUND, format=2))) == "manifest.json has format 2; this version reads 1"

    @pytest.mark.parametrize(
        "change",
        [
            {"state": []},
            {"state": {}},
            {"state": {"phase": "x", "step": 0, "updates": 0, "samples": 0, "finished": ""}},
            {"files": []},
            {"files": {"a": 1}},
            {"files": {"a": {"size": 1}}},
            {"sequence": []},
            {"format": "1"},
            {"surprise": 1},
        ],
    )
    def test_other_types_than_expected(self, change: dict[str, Any]) -> None:
        assert self.refused(asdict(self.SOUND) | change).startswith("manifest.json cannot be read")

    @pytest.mark.parametrize(
        "data", [b"", b"[]", b"null", b"{}", b"[" * 100_000, b"\xff", b'{"body": {}, "digest": 1}']
    )
    def test_what_is_no_manifest(self, data: bytes) -> None:
        with pytest.raises(InvalidCheckpointError):
            Manifest.decode(data)
