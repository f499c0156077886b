"""The newest whole checkpoint is always the last acknowledged one or the one under way; the rest is kept or cleared."""

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from phasetrain.checkpoint import Checkpointer
from phasetrain.checkpoint.codec import encode
from phasetrain.checkpoint.commit import Verify, commit
from phasetrain.errors import ConfigError, NoValidCheckpointError, PhasetrainError
from phasetrain.state import RunState
from phasetrain.storage import Storage

PROMISED = {"config": {"RUN": {"seed": 0}}}


class Died(BaseException):
    """The process is gone: no handler of the package takes it."""


def at(step: int) -> RunState:
    return RunState(step=step, updates=step, samples=8 * step)


def learned(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3,), float(step))}}


def checkpointer(root: Path, before: Any = None, *, keep_last: int = 3, verify: Verify = "full") -> Checkpointer:
    return Checkpointer(str(root), Storage(before), keep_last=keep_last, verify=verify)


def save(root: Path, steps: list[int], before: Any = None, *, keep_last: int = 3) -> Checkpointer:
    """Save at each step with one checkpointer, as one attempt of a run does."""
    made = checkpointer(root, before, keep_last=keep_last)
    for step in steps:
        made.save(at(step), learned(step), PROMISED)
    return made


def newest(root: Path, verify: Verify = "full") -> int | None:
    """Return the step of the newest whole checkpoint, after a look at its weights."""
    loaded = checkpointer(root, verify=verify).newest()
    if loaded is None:
        return None
    step = loaded.manifest.state["step"]
    assert loaded.state["model"]["weight"].tolist() == [float(step)] * 3
    assert loaded.promised == PROMISED
    return int(step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def steps(root: Path) -> list[int]:
    return [int(name.partition("-s")[2]) for name in names(root) if name.startswith("p")]


def test_nothing_is_there_before_the_first_save(tmp_path: Path) -> None:
    made = checkpointer(tmp_path / "none")
    assert made.newest() is None
    assert not made.finished()
    made.clear_leftovers()


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, [3])
    loaded = checkpointer(tmp_path).newest()
    assert loaded is not None
    assert (loaded.path, loaded.promised) == (f"{tmp_path}/p0000-s00000003", PROMISED)
    assert loaded.manifest.state == at(3).state_dict()
    assert names(tmp_path) == ["latest", "p0000-s00000003"]
    assert (tmp_path / "latest").read_text() == "p0000-s00000003"


def test_lineage_and_sequence_go_on_over_attempts(tmp_path: Path) -> None:
    save(tmp_path, [1, 2])
    again = checkpointer(tmp_path)
    first = again.newest()
    saved = again.save(at(3), learned(3), PROMISED)
    assert first is not None
    assert [first.manifest.sequence, saved.manifest.sequence] == [2, 3]
    assert saved.manifest.run == first.manifest.run
    assert (first.manifest.parent, saved.manifest.parent) == (None, "p0000-s00000002")


def test_finished_is_told_from_the_manifest(tmp_path: Path) -> None:
    made = checkpointer(tmp_path)
    made.save(at(1), learned(1), PROMISED)
    assert not made.finished()
    made.save(RunState(1, 0, 1, 8, "completed"), learned(0), PROMISED)
    assert made.finished()


class TestRetention:
    @pytest.mark.parametrize(("keep_last", "kept"), [(2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
    def test_the_newest_are_kept(self, tmp_path: Path, keep_last: int, kept: list[int]) -> None:
        save(tmp_path, [1, 2, 3, 4, 5], keep_last=keep_last)
        assert steps(tmp_path) == kept

    def test_a_new_attempt_deletes_nothing_before_it_has_verified_two(self, tmp_path: Path) -> None:
        save(tmp_path, [1, 2, 3])
        made = checkpointer(tmp_path, keep_last=2)  # verifies nothing: it never loads
        made.save(at(4), learned(4), PROMISED)
        assert steps(tmp_path) == [1, 2, 3, 4]
        made.save(at(5), learned(5), PROMISED)
        assert steps(tmp_path) == [4, 5]

    def test_what_was_loaded_counts_as_verified(self, tmp_path: Path) -> None:
        save(tmp_path, [1, 2, 3])
        made = checkpointer(tmp_path, keep_last=2)
        made.newest()
        made.save(at(4), learned(4), PROMISED)
        assert steps(tmp_path) == [3, 4]

    @pytest.mark.parametrize("keep_last", [1, 2])
    def test_never_fewer_than_two(self, tmp_path: Path, keep_last: int) -> None:
        save(tmp_path, [1, 2, 3, 4], keep_last=keep_last)
        assert len(steps(tmp_path)) >= 2


class TestDying:
    """Die before every operation of a save; the last acknowledged checkpoint or the new one is the newest."""

    @pytest.mark.parametrize(
        ("before", "step"),
        [([], 1), ([1], 2), ([1, 2], 2), ([1, 2, 3], 4)],
        ids=["first save", "second save", "same position again", "save that prunes"],
    )
    def test_at_every_operation(self, tmp_path: Path, before: list[int], step: int) -> None:
        number, outcomes = 0, set()
        outcomes_allowed = {step, before[-1] if before else None}
        while True:
            root = tmp_path / str(number)
            if not self.dies(root, before, step, number):
                break
            again = checkpointer(root)
            again.clear_leftovers()
            assert all(name == "latest" or (name.startswith("p") and ".tmp-" not in name) for name in names(root))
            found = newest(root)
            assert found in outcomes_allowed
            outcomes.add(found)
            assert (again.newest() is None) == (found is None)
            again.save(at(9), learned(9), PROMISED)
            assert newest(root) == 9
            assert len(steps(root)) >= min(2, len(before) + 1)
            number += 1
        assert number > 12
        assert outcomes == outcomes_allowed

    @staticmethod
    def dies(root: Path, before: list[int], step: int, number: int) -> bool:
        """Save at `step` after the saves `before`, dying before operation `number`; tell whether it came to that."""
        made, left = save(root, before), [number]

        def failpoint(operation: str, path: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Died

        made.storage = Storage(failpoint)
        try:
            made.save(at(step), learned(step), PROMISED)
        except Died:
            return True
        return False


@pytest.mark.parametrize("before", [[], [1], [1, 2], [1, 2, 3]])
def test_a_full_disk_at_every_operation(tmp_path: Path, before: list[int]) -> None:
    step = before[-1] if before == [1, 2] else len(before) + 1
    for number in range(100):
        root, said = tmp_path / str(number), list[str]()
        made, seen = save(root, before), [0]

        def failpoint(operation: str, path: str, number: int = number, seen: list[int] = seen) -> None:
            seen[0] += 1
            if seen[0] == number + 1:
                raise OSError(errno.ENOSPC, "No space left on device", path)

        made.storage, made.say = Storage(failpoint), said.append
        try:
            made.save(at(step), learned(step), PROMISED)
        except PhasetrainError as error:
            needed = sum(map(len, encode({**learned(step), "promised": PROMISED})))
            told = str(error)
            assert told.startswith(f"checkpoint at update {step} could not be saved in {str(root)!r}: ")
            assert told.endswith(f"(errno {errno.ENOSPC}); it needs {needed} bytes")
            assert "No space left on device" in told
            assert newest(root) == (before[-1] if before else None)
            if root.exists():
                assert [name for name in names(root) if name != "latest"] == [f"p0000-s{s:08d}" for s in before]
            assert said == []
        else:
            assert newest(root) == step
            if seen[0] <= number:
                assert said == []
                break
            assert said[0].startswith(f"{root}/p0000-s{step:08d} is saved, but older ones could not be cleared away: ")
        made.storage = Storage()
        made.save(at(9), learned(9), PROMISED)
        assert newest(root) == 9
        assert not any(name.startswith(".") for name in names(root))
    else:
        pytest.fail("the save never went through")
    assert number > 10


class TestFallingBack:
    @pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
    @pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
    def test_the_one_before_is_used_and_it_is_said(self, tmp_path: Path, name: str, damage: str) -> None:
        save(tmp_path, [1, 2, 3])
        file = tmp_path / "p0000-s00000003" / name
        data = bytearray(file.read_bytes())
        data[random.Random(0).randrange(len(data))] ^= 1
        file.write_bytes(data if damage == "flip" else data[:-1])
        if damage == "remove":
            file.unlink()
        said: list[str] = []
        made = checkpointer(tmp_path)
        made.say = said.append
        loaded = made.newest()
        assert loaded is not None
        assert loaded.manifest.state["step"] == 2
        assert len(said) == 1
        assert said[0].startswith(f"checkpoint {tmp_path}/p0000-s00000003 was passed over: {name} ")
        made.save(at(3), learned(3), PROMISED)
        assert newest(tmp_path) == 3

    def test_none_is_left(self, tmp_path: Path) -> None:
        save(tmp_path, [1, 2])
        for step in (1, 2):
            (tmp_path / f"p0000-s0000000{step}" / "state.json").unlink()
        with pytest.raises(NoValidCheckpointError) as caught:
            newest(tmp_path)
        assert caught.value.exit_code == 5
        assert "p0000-s00000001: state.json cannot be read (No such file or directory)" in str(caught.value)
        assert "p0000-s00000002" in str(caught.value)

    def test_a_content_of_another_form_is_passed_over(self, tmp_path: Path) -> None:
        save(tmp_path, [1])
        for step, (tree, tensors) in enumerate([encode([1]), encode({"state": {}}), (b"{", encode({})[1])], 2):
            contents = {"state.json": tree, "tensors.safetensors": tensors}
            commit(Storage(), str(tmp_path), at(step), contents, sequence=step, run="r", parent=None)
        commit(Storage(), str(tmp_path), at(8), {"state.json": b"{}"}, sequence=8, run="r", parent=None)
        assert newest(tmp_path) == 1

    def test_without_verification_a_flip_of_the_weights_passes(self, tmp_path: Path) -> None:
        save(tmp_path, [1])
        file = tmp_path / "p0000-s00000001" / "tensors.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        loaded = checkpointer(tmp_path, verify="size").newest()
        assert loaded is not None
        assert loaded.state["model"]["weight"].tolist() != [1.0] * 3
        with pytest.raises(NoValidCheckpointError):
            newest(tmp_path, "full")


class TestLoad:
    def test_by_path(self, tmp_path: Path) -> None:
        save(tmp_path, [1, 2])
        assert checkpointer(tmp_path / "elsewhere").load(f"{tmp_path}/p0000-s00000001/").manifest.state["step"] == 1

    def test_what_is_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            checkpointer(tmp_path).load(f"{tmp_path}/none")
        assert str(caught.value) == (
            f"RUN.checkpoint = '{tmp_path}/none' is no checkpoint that can be used: manifest.json cannot be read "
            "(No such file or directory)"
        )

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        save(tmp_path, [1])
        (tmp_path / "p0000-s00000001" / "state.json").write_text(json.dumps({}))
        with pytest.raises(ConfigError, match=r"state\.json has 2 bytes, the manifest says \d+$"):
            checkpointer(tmp_path).load(f"{tmp_path}/p0000-s00000001")


def test_leftovers_are_cleared_and_named(tmp_path: Path) -> None:
    save(tmp_path, [1])
    for name in ("p0000-s00000002.tmp-0a1b2c3d", ".trash-p0000-s00000000-0a1b2c3d", "latest.tmp-0a1b2c3d"):
        (tmp_path / name).mkdir()
    said: list[str] = []
    made = checkpointer(tmp_path)
    made.say = said.append
    made.clear_leftovers()
    assert names(tmp_path) == ["latest", "p0000-s00000001"]
    assert said[-1] == f"cleared {tmp_path}/p0000-s00000002.tmp-0a1b2c3d, left by an interrupted save"
    assert len(said) == 3
