"""Checkpoints survive a death at every operation of a save, a prune and a start, and every refusal
of a disk."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import ERRORS, PLACES, Died, Failpoint, Files, Place, refused, top

from phasetrain.checkpoint import Checkpointer, Retention
from phasetrain.engine.position import RunState
from phasetrain.errors import NoValidCheckpointError, SaveError
from phasetrain.runtime.storage import Storage

Kind = Callable[[Path], Place]

SAVES = pytest.mark.parametrize(
    ("before", "step"),
    [([], 1), ([1], 2), ([1, 2], 2), ([1, 2, 3], 4)],
    ids=["first save", "second save", "same position again", "save that prunes"],
)


def at(step: int) -> RunState:
    return RunState(step=step, updates=step, samples=8 * step)


def learned(step: int) -> dict[str, Any]:
    return {"task": {"model": {"weight": torch.full((3,), float(step))}}}


def checkpointer(place: Place, before: Failpoint | None = None) -> Checkpointer:
    return Checkpointer(place.path, place.storage(before), Retention(3))


def saved(place: Place, steps: list[int]) -> Checkpointer:
    """Return a checkpointer that has saved at each step, as one attempt of a run does."""
    made = checkpointer(place)
    for step in steps:
        made.save(at(step), learned(step), {})
    return made


def newest(place: Place) -> tuple[int, int] | None:
    """Return step and sequence of the newest whole checkpoint, after a look at its weights."""
    loaded = checkpointer(place).load_newest()
    if loaded is None:
        return None
    step = int(loaded.manifest.state["step"])
    assert loaded.state["task"]["model"]["weight"].tolist() == [float(step)] * 3
    return step, loaded.manifest.sequence


def cleared(place: Place) -> list[str]:
    """Return the checkpoints in a place that holds nothing else, each of them whole."""
    made = checkpointer(place)
    names = [name for name in top(place) if name != "latest"]
    assert [saved.name for saved in made.list_checkpoints()] == names
    for name in names:
        made.load(f"{place.path}/{name}")
    assert not any(".tmp-" in path for path in place.content())
    return names


class TestDyingInASave:
    """The last acknowledged checkpoint or the new one is the newest, whatever the process dies
    at."""

    @pytest.mark.by_default("files-save that prunes", "objects-same position again")
    @SAVES
    @pytest.mark.parametrize("kind", PLACES)
    def test_at_every_operation(
        self, tmp_path: Path, kind: Kind, before: list[int], step: int
    ) -> None:
        old, new = (before[-1], len(before)) if before else None, (step, len(before) + 1)
        number, outcomes = 0, []
        while self.dies(place := kind(tmp_path / str(number)), before, step, number):
            again = checkpointer(place)
            again.clear_leftovers()
            assert len(cleared(place)) >= min(2, len(before))
            outcomes.append(newest(place))
            assert (again.load_newest() is None) == (outcomes[-1] is None)
            again.save(at(9), learned(9), {})
            assert newest(place) == (9, len(before) + 1 + (outcomes[-1] == new))
            assert len(cleared(place)) >= min(2, len(before) + 1)
            number += 1
        assert number > 12
        assert outcomes == [old] * outcomes.count(old) + [new] * outcomes.count(new)
        assert set(outcomes) == {old, new}

    @staticmethod
    def dies(place: Place, before: list[int], step: int, number: int) -> bool:
        """Save at `step` after the saves `before`, dying before operation `number`; tell whether it
        came to that."""
        made = saved(place, before)
        made.storage = place.storage(Failpoint(number))
        try:
            made.save(at(step), learned(step), {})
        except Died:
            return True
        return False


class TestDyingInAStart:
    """A start that clears away what another death left, and reads the newest, may die as well,
    again and again."""

    @pytest.mark.by_default("a save-objects", "a prune-files")
    @pytest.mark.parametrize("kind", PLACES)
    @pytest.mark.parametrize(
        "left", ["a save", "its last operation before the commit counts", "a prune"]
    )
    def test_at_every_operation(self, tmp_path: Path, kind: Kind, left: str) -> None:
        at_once, late, prune = (6, 15, 26) if kind is Files else (6, 10, 19)
        died = {"a save": at_once, "a prune": prune}.get(left, late)
        number = 0
        while True:
            place = kind(tmp_path / str(number))
            assert TestDyingInASave.dies(place, [1, 2, 3], 4, died)
            assert any(".tmp-" in path or ".trash-" in path for path in place.content())
            expected, before = newest(place), Failpoint(number)
            starting = checkpointer(place, before)
            try:
                starting.clear_leftovers()
                starting.load_newest()
            except Died:
                assert newest(place) == expected
                again = checkpointer(place)
                again.clear_leftovers()
                again.load_newest()
                cleared(place)
                assert newest(place) == expected
            else:
                break
            number += 1
        assert number >= 6

    def test_it_would_notice_a_start_that_deletes_too_much(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def greedy(made: Checkpointer) -> None:
            """Make room by deleting the newest one."""
            made.storage.remove(f"{made.root}/{made.storage.list_names(made.root)[-1]}")

        monkeypatch.setattr(Checkpointer, "clear_leftovers", greedy)
        with pytest.raises((AssertionError, NoValidCheckpointError)):
            self.test_at_every_operation(tmp_path, Files, "a save")


class TestRefusing:
    """A disk that refuses any operation of a save once takes nothing away, and the next save goes
    through."""

    @pytest.mark.by_default("files-same position again", "objects-save that prunes")
    @SAVES
    @pytest.mark.parametrize("kind", PLACES)
    def test_once(self, tmp_path: Path, kind: Kind, before: list[int], step: int) -> None:
        failed = noted = 0
        for number in range(100):
            place, said = kind(tmp_path / str(number)), list[str]()
            made, error = saved(place, before), ERRORS[number % len(ERRORS)]
            made.say = said.append
            refusing = Failpoint(number, refused(error))
            made.storage = place.storage(refusing)
            try:
                made.save(at(step), learned(step), {})
            except SaveError as told:
                failed += 1
                self.check_message(str(told), place, step, error)
                assert newest(place) == ((before[-1], len(before)) if before else None)
                assert cleared(place) == [f"p0000-s{s:08d}" for s in before]
                assert said == []
            else:
                assert newest(place) == (step, len(before) + 1)
                noted += bool(said)
                assert all(line.startswith(f"{place.path}/p0000-s0000000{step}") for line in said)
                if not refusing.raised:
                    break
            made.storage = place.storage()
            made.save(at(9), learned(9), {})
            assert newest(place) == (9, len(before) + 1 + (failed < number + 1))
            assert not any(".tmp-" in path or ".trash-" in path for path in place.content())
        else:
            pytest.fail("the save never went through")
        assert failed > 8
        assert noted > 0

    @staticmethod
    def check_message(told: str, place: Place, step: int, error: int) -> None:
        assert f" update {step} " in told
        assert repr(place.path) in told
        assert f" (errno {error} {errno.errorcode[error]}) at {place.path}" in told
        needed, free = told.rpartition("; it needs ")[2].split(" bytes and ")
        assert int(needed.replace(",", "")) > 100
        assert (
            free == "an unknown number of bytes are free"
            or int(free.split()[0].replace(",", "")) > 0
        )

    @pytest.mark.by_default("files")
    @pytest.mark.parametrize("kind", PLACES)
    def test_from_an_operation_on(self, tmp_path: Path, kind: Kind) -> None:
        for number in range(30):
            place = kind(tmp_path / str(number))
            made = saved(place, [1, 2, 3])
            made.storage = place.storage(Failpoint(number, refused(errno.EROFS), lasting=True))
            refusals = 0
            for step in (4, 5):
                try:
                    made.save(at(step), learned(step), {})
                except SaveError:
                    refusals += 1
            assert refusals >= 1
            found = newest(place)
            assert found is not None
            assert found[0] >= 3
            made.storage = place.storage()
            made.save(at(9), learned(9), {})
            after = newest(place)
            assert after is not None
            assert after[0] == 9
            made.clear_leftovers()
            assert len(cleared(place)) >= 3


class TestReading:
    @pytest.mark.parametrize("kind", PLACES)
    @pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
    # Three manifests, and three files of the newest; the header of one is read by itself.
    @pytest.mark.parametrize(("in_place", "count"), [(False, 6), (True, 8)])
    def test_an_error_at_any_read_leads_to_the_checkpoint_before(
        self, tmp_path: Path, kind: Kind, error: int, count: int, *, in_place: bool
    ) -> None:
        place = kind(tmp_path / "count")
        made, reads = saved(place, [1, 2, 3]), list[str]()
        made.storage = place.storage(lambda operation, path: reads.append(path))
        made.reads_in_place = in_place
        assert made.load_newest() is not None
        assert len(reads) == count
        for number, path in enumerate(reads):
            said: list[str] = []
            saved(place := kind(tmp_path / str(number)), [1, 2, 3])
            made = checkpointer(place, Failpoint(number, refused(error)))
            made.say = said.append
            made.reads_in_place = in_place
            loaded = made.load_newest()
            assert loaded is not None
            hurt = "s00000003" in path
            assert loaded.manifest.state["step"] == (2 if hurt else 3)
            assert len(said) == 1
            assert path.split("/")[-2] in said[0]
            made.storage = place.storage()
            made.save(at(3), learned(3), {})
            assert newest(place) == (3, 3 if "s00000003/manifest" in path else 4)

    def test_a_disk_that_reads_nothing_is_not_taken_for_an_empty_folder(
        self, tmp_path: Path
    ) -> None:
        place = Files(tmp_path / "place")
        saved(place, [1, 2, 3])
        with pytest.raises(NoValidCheckpointError, match="Input/output error"):
            checkpointer(place, Failpoint(0, refused(errno.EIO), lasting=True)).load_newest()
        assert newest(place) == (3, 3)


def test_a_death_between_the_commit_and_the_pointer_is_repaired_by_the_next_save(
    tmp_path: Path,
) -> None:
    place = Files(tmp_path / "place")
    made = saved(place, [1])

    def before(operation: str, path: str) -> None:
        if "latest" in path:
            raise Died

    made.storage = Storage(before)
    with pytest.raises(Died):
        made.save(at(2), learned(2), {})
    assert Path(place.path, "latest").read_text() == "p0000-s00000001"
    assert newest(place) == (2, 2)
    again = checkpointer(place)
    again.load_newest()
    again.save(at(3), learned(3), {})
    assert Path(place.path, "latest").read_text() == "p0000-s00000003"
