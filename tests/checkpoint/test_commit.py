"""A checkpoint exists whole or not at all, whatever operation the process dies at or the disk
refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failpoints import ERRORS, PLACES, Died, Failpoint, Files, Objects, Place, refused, top

from phasetrain.checkpoint import commit as protocol
from phasetrain.checkpoint.commit import (
    FORMAT,
    Manifest,
    checkpoint_name,
    commit,
    delete_checkpoint,
    delete_leftovers,
    list_checkpoints,
    read_files,
    read_manifest,
)
from phasetrain.engine.position import RunState
from phasetrain.errors import InvalidCheckpointError
from phasetrain.runtime.storage import FileRecord, Storage, Unfinished, tree_digest

FIRST, SECOND = RunState(1, 0, 5, 50), RunState(1, 1, 5, 50)
CONTENTS = {"tensors.safetensors": b"weights" * 9, "state.json": b"{}"}
OLD = "p0001-s00000000: weights"

Kind = Callable[[Path], Place]


def write(
    place: Place,
    state: RunState,
    before: Failpoint | None = None,
    *,
    sequence: int = 1,
    data: bytes = b"weights" * 9,
    give_up: Callable[[], bool] = lambda: False,
) -> protocol.Saved:
    contents = CONTENTS | {"tensors.safetensors": data}

    def describe(files: dict[str, FileRecord]) -> Manifest:
        return Manifest(FORMAT, sequence, "r", None, state.state_dict(), files)

    return commit(place.storage(before), place.path, contents, describe, give_up=give_up)


def listed(place: Place) -> list[str]:
    """Return `name: weights` of every checkpoint that is listed, after reading all of its files."""
    texts = []
    for saved in list_checkpoints(place.storage(), place.path)[0]:
        contents = read_files(place.storage(), f"{place.path}/{saved.name}", saved.manifest, "full")
        assert contents.keys() == CONTENTS.keys()
        texts.append(f"{saved.name}: {contents['tensors.safetensors'].decode()[:7]}")
    return texts


def whole(place: Place) -> list[str]:
    """Return the same after making sure that there is nothing else."""
    assert list_checkpoints(place.storage(), place.path)[1] == {}
    found = listed(place)
    assert top(place) == sorted(text.partition(":")[0] for text in found)
    assert not any(".tmp-" in path for path in place.content())
    return found


def operations(act: Callable[[Place, Failpoint], Any], place: Place) -> int:
    """Return how many operations an act takes."""
    counter = Failpoint(None)
    act(place, counter)
    assert counter.seen > 1
    return counter.seen


def test_a_committed_checkpoint(tmp_path: Path) -> None:
    saved = write(Files(tmp_path / "place"), FIRST)
    folder = tmp_path / "place" / "p0001-s00000000"
    assert saved.name == folder.name
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "state.json",
        "tensors.safetensors",
    ]
    manifest = read_manifest(Storage(), str(folder))
    assert manifest == saved.manifest
    assert manifest.state == {"phase": 1, "step": 0, "updates": 5, "samples": 50, "finished": ""}
    assert (manifest.order, manifest.files["state.json"].size) == ((1, 0, 1), 2)


def test_folder_names_sort_like_positions() -> None:
    assert checkpoint_name(RunState(3, 17)) == "p0003-s00000017"
    assert checkpoint_name(RunState(12345, 123456789)) == "p12345-s123456789"


@pytest.mark.parametrize("kind", PLACES)
def test_checkpoints_are_ordered_by_position_then_sequence_and_never_by_time(
    tmp_path: Path, kind: Kind
) -> None:
    place = kind(tmp_path / "place")
    for sequence, state in enumerate(
        [RunState(10, 0), RunState(2, 100), RunState(2, 9), RunState(12345, 0)]
    ):
        write(place, state, sequence=sequence)
    write(place, RunState(2, 9), sequence=4)
    place.storage().replace(f"{place.path}/latest", b"p0002-s00000009")
    place.storage().replace(f"{place.path}/notes/a.txt", b"") if kind is Objects else None
    found, rejected = list_checkpoints(place.storage(), place.path)
    assert [saved.manifest.order for saved in found] == [
        (2, 9, 2),
        (2, 9, 4),
        (2, 100, 1),
        (10, 0, 0),
        (12345, 0, 3),
    ]
    assert rejected == {}


@pytest.mark.parametrize("kind", PLACES)
def test_a_second_commit_of_a_position_gets_a_name_that_nothing_has(
    tmp_path: Path, kind: Kind
) -> None:
    place = kind(tmp_path / "place")
    write(place, FIRST)
    assert write(place, FIRST, sequence=2, data=b"another").name == "p0001-s00000000-c2"
    place.storage().remove(
        f"{place.path}/p0001-s00000000-c2/manifest.json"
    )  # its number is known to nobody now
    assert write(place, FIRST, sequence=2, data=b"further").name == "p0001-s00000000-c3"
    assert listed(place) == [OLD, "p0001-s00000000-c3: further"]
    assert list_checkpoints(place.storage(), place.path)[1].keys() == {"p0001-s00000000-c2"}


class TestDying:
    """Die before every operation of an act; afterwards the old or the new is there, whole, and a
    sweep leaves that."""

    def check_encodable(
        self, tmp_path: Path, kind: Kind, prepare: Any, act: Any, outcomes: list[list[str]]
    ) -> None:
        prepare(counted := kind(tmp_path / "count"))
        seen = []
        for number in range(operations(act, counted)):
            prepare(place := kind(tmp_path / str(number)))
            with pytest.raises(Died):
                act(place, Failpoint(number))
            before = listed(place)
            swept = delete_leftovers(place.storage(), place.path)
            assert not {text.partition(":")[0] for text in before} & set(swept)
            assert whole(place) == before
            assert before in outcomes
            seen.append(before)
            write(place, RunState(9, 9), sequence=9, data=b"further")
            assert whole(place)[-1] == "p0009-s00000009: further"
        assert sorted(outcomes, key=seen.index) == outcomes  # each was met, the old ones first

    @pytest.mark.parametrize("kind", PLACES)
    def test_the_first_commit(self, tmp_path: Path, kind: Kind) -> None:
        self.check_encodable(
            tmp_path,
            kind,
            prepare=lambda place: None,
            act=lambda place, before: write(place, FIRST, before),
            outcomes=[[], [OLD]],
        )

    @pytest.mark.parametrize("kind", PLACES)
    def test_the_second_commit(self, tmp_path: Path, kind: Kind) -> None:
        self.check_encodable(
            tmp_path,
            kind,
            prepare=lambda place: write(place, FIRST),
            act=lambda place, before: write(place, SECOND, before, sequence=2),
            outcomes=[[OLD], [OLD, "p0001-s00000001: weights"]],
        )

    @pytest.mark.parametrize("kind", PLACES)
    def test_a_commit_of_the_same_position(self, tmp_path: Path, kind: Kind) -> None:
        self.check_encodable(
            tmp_path,
            kind,
            prepare=lambda place: write(place, FIRST),
            act=lambda place, before: write(place, FIRST, before, sequence=2, data=b"another"),
            outcomes=[[OLD], [OLD, "p0001-s00000000-c2: another"]],
        )

    @pytest.mark.parametrize("kind", PLACES)
    def test_a_deletion(self, tmp_path: Path, kind: Kind) -> None:
        self.check_encodable(
            tmp_path,
            kind,
            prepare=lambda place: write(place, FIRST),
            act=lambda place, before: delete_checkpoint(
                place.storage(before), place.path, "p0001-s00000000"
            ),
            outcomes=[[OLD], []],
        )

    @pytest.mark.parametrize("kind", PLACES)
    def test_a_sweep(self, tmp_path: Path, kind: Kind) -> None:
        def prepare(place: Place) -> None:
            """Leave what a save, a deletion, and on objects the end of a save, leave when they are
            killed."""
            write(place, FIRST)
            name = write(place, SECOND).name
            with pytest.raises(Died):
                delete_checkpoint(place.storage(Failpoint(4)), place.path, name)
            with pytest.raises(Died):
                write(place, RunState(2, 0), Failpoint(4))
            if isinstance(place, Objects):
                place.objects[f"{place.path}/p0001-s00000000/written.tmp-0a1b2c3d"] = b""

        self.check_encodable(
            tmp_path,
            kind,
            prepare=prepare,
            act=lambda place, before: delete_leftovers(place.storage(before), place.path),
            outcomes=[[OLD]],
        )


def in_place(
    storage: Storage, root: str, contents: Any, describe: Any, give_up: Any = None
) -> protocol.Saved:
    """Write over whatever is there, and vouch for it first."""
    files = {name: FileRecord(len(data), tree_digest(data)) for name, data in contents.items()}
    final = f"{root}/{'p0001-s00000000'}"
    storage.remove(f"{final}/state.json")
    storage.create(f"{final}/state.json", contents["state.json"])
    return protocol.Saved(final, describe(files))


def manifest_first(
    storage: Storage, root: str, contents: Any, describe: Any, give_up: Any = None
) -> protocol.Saved:
    """Write the manifest before the files of which it speaks."""
    files = {name: FileRecord(len(data), tree_digest(data)) for name, data in contents.items()}
    manifest = describe(files)
    final = f"{root}/{name_of(manifest)}"
    storage.make_folder(final)
    storage.create(f"{final}/manifest.json", manifest.encode())
    for name, data in contents.items():
        storage.create(f"{final}/{name}", data)
    return protocol.Saved(name_of(manifest), manifest)


def published_early(
    storage: Storage, root: str, contents: Any, describe: Any, give_up: Any = None
) -> protocol.Saved:
    """Publish before the last file is written."""
    files = {name: FileRecord(len(data), tree_digest(data)) for name, data in contents.items()}
    manifest = describe(files)
    final = f"{root}/{name_of(manifest)}"
    working = storage.begin_folder(final)
    storage.create(f"{working}/manifest.json", manifest.encode())
    storage.publish_folder(working, final)
    for name, data in contents.items():
        storage.create(f"{final}/{name}", data)
    return protocol.Saved(name_of(manifest), manifest)


def unmarked(
    storage: Storage, root: str, contents: Any, describe: Any, give_up: Any = None
) -> protocol.Saved:
    """Write straight into the folder, the manifest last, without a mark that tells what a kill
    leaves."""
    files = {}
    final = f"{root}/{name_of(describe({}))}"
    storage.make_folder(final)
    for name, data in contents.items():
        files[name] = storage.create(f"{final}/{name}", data)
    storage.create(f"{final}/manifest.json", describe(files).encode())
    return protocol.Saved(name_of(describe({})), describe(files))


def name_of(manifest: Manifest) -> str:
    state = RunState()
    state.load_state_dict(manifest.state)
    return checkpoint_name(state)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(
    ("broken", "caught"),
    [
        (protocol.commit, False),
        (in_place, True),
        (manifest_first, True),
        (published_early, True),
        (unmarked, True),
    ],
)
def test_the_enumeration_catches_protocols_that_are_not_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, broken: Any, caught: bool
) -> None:
    original = write

    def second(place: Place, state: RunState, *rest: Any, **known: Any) -> protocol.Saved:
        """Write the second checkpoint in the broken way."""
        monkeypatch.setattr(f"{__name__}.commit", broken if state == SECOND else protocol.commit)
        return original(place, state, *rest, **known)

    monkeypatch.setattr(f"{__name__}.write", second)
    found = False
    try:
        TestDying().test_the_second_commit(tmp_path, kind)
    except (AssertionError, InvalidCheckpointError):
        found = True
    assert found is caught


class TestRefusing:
    """A disk that refuses any operation, once or from then on, takes nothing away."""

    @pytest.mark.parametrize("kind", PLACES)
    @pytest.mark.parametrize("number", ERRORS)
    @pytest.mark.parametrize("again", [False, True], ids=["new position", "same position"])
    def test_once(self, tmp_path: Path, kind: Kind, number: int, again: bool) -> None:
        state = FIRST if again else SECOND
        write(counted := kind(tmp_path / "count"), FIRST)
        count = operations(
            lambda place, before: write(place, state, before, sequence=2, data=b"another"), counted
        )
        accepted = 0
        for at in range(count):
            write(place := kind(tmp_path / str(at)), FIRST)
            told = 0
            try:
                write(place, state, Failpoint(at, refused(number)), sequence=2, data=b"another")
            except OSError as error:
                told = error.errno or 0
            if told:
                assert (told, whole(place)) == (number, [OLD])
            else:  # on objects the mark may stay until the next sweep
                accepted += 1
                delete_leftovers(place.storage(), place.path)
                assert len(whole(place)) == 2
        assert accepted == (0 if kind is Files else 1)

    @pytest.mark.parametrize("kind", PLACES)
    def test_from_then_on(self, tmp_path: Path, kind: Kind) -> None:
        write(counted := kind(tmp_path / "count"), FIRST)
        for at in range(
            operations(lambda place, before: write(place, SECOND, before, sequence=2), counted)
        ):
            write(place := kind(tmp_path / str(at)), FIRST)
            before = Failpoint(at, refused(ERRORS[3]), lasting=True)
            try:
                write(place, SECOND, before, sequence=2)
            except OSError:
                assert before.raised >= 1
            assert listed(place)[0] == OLD
            delete_leftovers(place.storage(), place.path)
            assert whole(place)[0] == OLD


@pytest.mark.parametrize("kind", PLACES)
def test_giving_up_at_any_moment_leaves_nothing(tmp_path: Path, kind: Kind) -> None:
    asked: list[int] = []
    write(kind(tmp_path / "count"), FIRST, give_up=lambda: bool(asked.append(0)))
    assert len(asked) == 4  # before each file, and before each block of it
    for number in range(len(asked)):
        write(place := kind(tmp_path / str(number)), FIRST)
        left = iter([False] * number + [True])
        with pytest.raises(Unfinished):
            write(place, SECOND, sequence=2, give_up=lambda left=left: next(left))
        assert whole(place) == [OLD]
