"""The newest whole checkpoint is always the last acknowledged one or the one under way; the rest is
kept or cleared."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import save as save_tensors

from phasetrain.checkpoint import Checkpointer, Facts, Manifest, Retention
from phasetrain.checkpoint.codec import encode
from phasetrain.checkpoint.commit import INDEX, Verify, commit
from phasetrain.config import addons
from phasetrain.distributed import World
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NoValidCheckpointError
from phasetrain.runtime.storage import FileRecord, Storage, Unfinished, tree_digest

PROMISED = {"config": {"RUN": {"seed": 0}}}


def at(step: int) -> RunState:
    return RunState(step=step, updates=step, samples=8 * step)


def learned(step: int, value: float | None = None) -> dict[str, Any]:
    return {
        "task": {"model": {"weight": torch.full((3,), float(step) if value is None else value)}}
    }


def checkpointer(
    root: Path, *, keep_last: int = 3, verify: Verify = "full", **known: Any
) -> Checkpointer:
    return Checkpointer(str(root), Storage(), Retention(keep_last, **known), verify=verify)


def save(root: Path, steps: list[int], *, keep_last: int = 3, **known: Any) -> Checkpointer:
    """Save at each step with one checkpointer, as one attempt of a run does."""
    made = checkpointer(root, keep_last=keep_last, **known)
    for step in steps:
        made.save(at(step), learned(step), PROMISED)
    return made


def newest(root: Path, verify: Verify = "full") -> int | None:
    """Return the step of the newest whole checkpoint, after a look at its weights."""
    steps = [newest_read(root, verify, in_place=in_place) for in_place in (False, True)]
    assert steps[0] == steps[1]
    return steps[0]


def newest_read(root: Path, verify: Verify, *, in_place: bool) -> int | None:
    """Return the result of `newest` for one way of reading."""
    made = checkpointer(root, verify=verify)
    made.reads_in_place = in_place
    loaded = made.load_newest()
    if loaded is None:
        return None
    step = loaded.manifest.state["step"]
    assert loaded.state["task"]["model"]["weight"].tolist() == [float(step)] * 3
    assert loaded.promised == PROMISED
    return int(step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def steps(root: Path) -> list[int]:
    return [int(name.partition("-s")[2]) for name in names(root) if name.startswith("p")]


def described(state: RunState, sequence: int) -> Callable[[dict[str, FileRecord]], Manifest]:
    return lambda files: Manifest(2, sequence, "r", None, state.state_dict(), files)


def test_nothing_is_there_before_the_first_save(tmp_path: Path) -> None:
    made = checkpointer(tmp_path / "none")
    assert made.load_newest() is None
    assert made.load_best() is None
    assert not made.is_finished()
    made.clear_leftovers()


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, [3])
    loaded = checkpointer(tmp_path).load_newest()
    assert loaded is not None
    assert (loaded.path, loaded.promised) == (f"{tmp_path}/p0000-s00000003", PROMISED)
    assert loaded.manifest.state == at(3).state_dict()
    assert names(tmp_path) == ["latest", "p0000-s00000003"]
    assert (tmp_path / "latest").read_text() == "p0000-s00000003"
    folder = tmp_path / "p0000-s00000003"
    assert names(folder) == ["manifest.json", "promised.json", "state.json", "tensors.safetensors"]


def test_lineage_and_sequence_go_on_over_attempts(tmp_path: Path) -> None:
    save(tmp_path, [1, 2])
    again = checkpointer(tmp_path)
    first = again.load_newest()
    saved = again.save(at(3), learned(3), PROMISED)
    assert first is not None
    assert [first.manifest.sequence, saved.manifest.sequence] == [2, 3]
    assert saved.manifest.run == first.manifest.run
    assert (first.manifest.parent, saved.manifest.parent) == (None, "p0000-s00000002")


def test_finished_is_told_from_the_manifest(tmp_path: Path) -> None:
    made = checkpointer(tmp_path)
    made.save(at(1), learned(1), PROMISED)
    assert not made.is_finished()
    made.save(RunState(1, 0, 1, 8, "completed"), learned(0), PROMISED)
    assert made.is_finished()


class TestDraft:
    def test_it_stays_as_it_is_while_the_weights_change(self, tmp_path: Path) -> None:
        made, weights = checkpointer(tmp_path), learned(1)
        draft = made.make_draft(
            at(1), weights, json.dumps(PROMISED).encode(), Facts("epoch", epochs=1)
        )
        weights["task"]["model"]["weight"] += 7
        saved = made.write(draft)
        assert newest(tmp_path) == 1
        assert saved.manifest.facts == Facts("epoch", epochs=1)

    def test_its_memory_is_used_again(self, tmp_path: Path) -> None:
        made = checkpointer(tmp_path)
        places = []
        for step in (1, 2):
            draft = made.make_draft(at(step), learned(step), json.dumps(PROMISED).encode(), Facts())
            places.append(torch.frombuffer(draft.tensors, dtype=torch.uint8).data_ptr())
            made.write(draft)
            assert newest(tmp_path) == step
        assert places[0] == places[1]

    def test_giving_up_is_no_failure_and_leaves_nothing(self, tmp_path: Path) -> None:
        made = save(tmp_path, [1])
        draft = made.make_draft(at(2), learned(2), b"{}", Facts())
        with pytest.raises(Unfinished):
            made.write(draft, give_up=lambda: True)
        assert names(tmp_path) == ["latest", "p0000-s00000001"]
        assert made.save(at(2), learned(2), PROMISED).manifest.sequence == 2


class TestRetention:
    @pytest.mark.parametrize(
        ("keep_last", "kept"), [(1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
    )
    def test_the_newest_are_kept(self, tmp_path: Path, keep_last: int, kept: list[int]) -> None:
        save(tmp_path, [1, 2, 3, 4, 5], keep_last=keep_last)
        assert steps(tmp_path) == kept

    @pytest.mark.feature(
        "90",
        "retention never deletes the last good checkpoint",
        "`CHECKPOINT.keep_last`, `keep_every`, `best`",
    )
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
        made.load_newest()
        made.save(at(4), learned(4), PROMISED)
        assert steps(tmp_path) == [3, 4]

    @pytest.mark.parametrize("keep_last", [1, 2])
    def test_never_fewer_than_two(self, tmp_path: Path, keep_last: int) -> None:
        save(tmp_path, [1, 2, 3, 4], keep_last=keep_last)
        assert len(steps(tmp_path)) >= 2

    def test_milestones_and_pinned_ones_stay(self, tmp_path: Path) -> None:
        made = save(tmp_path, [1, 2], keep_last=2, every_updates=4)
        (tmp_path / "p0000-s00000002.pinned").touch()
        for step in range(3, 9):
            made.save(at(step), learned(step), PROMISED)
        assert [name for name in names(tmp_path) if not name.startswith("l")] == [
            "p0000-s00000002", "p0000-s00000002.pinned", "p0000-s00000004", "p0000-s00000007", "p0000-s00000008",
        ]  # fmt: skip

    def test_a_second_commit_of_a_position_takes_the_place_of_the_first(
        self, tmp_path: Path
    ) -> None:
        made = save(tmp_path, [1, 2])
        made.save(at(2), learned(2), PROMISED | {"again": True})
        assert [name for name in names(tmp_path) if name != "latest"] == [
            "p0000-s00000001",
            "p0000-s00000002-c3",
        ]
        loaded = checkpointer(tmp_path).load_newest()
        assert loaded is not None
        assert loaded.promised["again"] is True

    def test_latest_is_set_before_others_are_deleted(self, tmp_path: Path) -> None:
        seen: list[tuple[str, str]] = []

        class Noting(Storage):
            def delete_folder(self, path: str, *args: Any) -> None:
                seen.append((Path(path).name, (tmp_path / "latest").read_text()))
                super().delete_folder(path, *args)

        made = Checkpointer(str(tmp_path), Noting(), Retention(2))
        for step in (1, 2, 3):
            made.save(at(step), learned(step), PROMISED)
        assert seen == [("p0000-s00000001", "p0000-s00000003")]

    def test_two_healthy_verified_ones_stay_however_many_others_come(self, tmp_path: Path) -> None:
        save(tmp_path, [1, 2, 3])
        made = checkpointer(tmp_path, keep_last=2)
        made.load_newest()  # verifies 3 alone; what is in 2 nobody knows
        for step in (4, 5, 6):
            made.save(at(step), learned(step, math.nan), PROMISED)
        assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
        made.save(at(7), learned(7), PROMISED)
        assert steps(tmp_path) == [3, 6, 7]

    @pytest.mark.parametrize("healthy", [0, 1])
    def test_unhealthy_ones_do_not_fill_the_disk(self, tmp_path: Path, healthy: int) -> None:
        made = save(tmp_path, list(range(1, healthy + 1)), keep_last=2)
        for step in range(2, 9):
            made.save(at(step), learned(step, math.nan), PROMISED)
        assert steps(tmp_path) == [1] * healthy + [7, 8]

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_latest_that_cannot_be_replaced_and_foreign_links_keep_nothing_from_being_cleared(
        self, tmp_path: Path, number: int
    ) -> None:
        said: list[str] = []
        outside, root = tmp_path / "outside", tmp_path / "place"
        outside.mkdir()
        (outside / "precious").touch()
        made = save(root, [1, 2], keep_last=2)
        made.say = said.append
        if number == 0:
            (root / "latest").unlink()
            (root / "latest").mkdir()
        (root / "p0000-s00000001").rename(root / "moved")
        (root / "p0000-s00000001").symlink_to(root / "moved", target_is_directory=True)
        (root / ".trash-p0000-s00000000-0a1b2c3d").symlink_to(outside, target_is_directory=True)
        (root / "p0000-s00000009.tmp-0a1b2c3d").symlink_to(root / "nowhere")
        for step in (3, 4):
            made.save(at(step), learned(step), PROMISED)
        assert names(root) == ["latest", "moved", "p0000-s00000003", "p0000-s00000004"]
        assert names(root / "moved")[0] == "manifest.json"
        assert names(outside) == ["precious"]
        assert len(said) == (2 if number == 0 else 0)
        assert all("is saved, but 'latest' could not be updated: " in line for line in said)


class TestHealth:
    def test_an_unhealthy_one_is_passed_over_and_it_is_said(self, tmp_path: Path) -> None:
        said: list[str] = []
        made = save(tmp_path, [1, 2])
        made.say = said.append
        made.save(at(3), learned(3, math.nan), PROMISED)
        assert len(said) == 1
        assert f"{tmp_path}/p0000-s00000003" in said[0]
        again = checkpointer(tmp_path)
        again.say = said.append
        loaded = again.load_newest()
        assert loaded is not None
        assert loaded.manifest.state["step"] == 2
        assert len(said) == 2
        assert f"{tmp_path}/p0000-s00000003" in said[1]
        again.save(at(3), learned(3), PROMISED)
        assert newest(tmp_path) == 3

    def test_where_there_is_no_other_it_is_used(self, tmp_path: Path) -> None:
        checkpointer(tmp_path).save(at(3), learned(3, math.nan), PROMISED)
        loaded = checkpointer(tmp_path).load_newest()
        assert loaded is not None
        assert (loaded.manifest.state["step"], loaded.manifest.facts.healthy) == (3, False)


class TestBest:
    def made(self, root: Path) -> Checkpointer:
        made = checkpointer(root, monitor="test/accuracy")
        for step, value in enumerate([0.5, 0.9, 0.7], 1):
            made.save(at(step), learned(step), PROMISED, Facts(metrics={"test/accuracy": value}))
        return made

    def test_it_is_loaded(self, tmp_path: Path) -> None:
        best = self.made(tmp_path).load_best()
        assert best is not None
        assert best.manifest.state["step"] == 2

    def test_the_next_best_where_it_is_damaged(self, tmp_path: Path) -> None:
        said: list[str] = []
        made = self.made(tmp_path)
        made.say = said.append
        (tmp_path / "p0000-s00000002" / "state.json").unlink()
        best = made.load_best()
        assert best is not None
        assert best.manifest.state["step"] == 3
        assert len(said) == 1


class TestFallingBack:
    @pytest.mark.parametrize(
        "name", ["manifest.json", "state.json", "tensors.safetensors", "promised.json"]
    )
    @pytest.mark.parametrize("damage", ["flip", "cut", "remove", "folder"])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_the_one_before_is_used_and_it_is_said(
        self, tmp_path: Path, name: str, damage: str, *, in_place: bool
    ) -> None:
        save(tmp_path, [1, 2, 3])
        file = tmp_path / "p0000-s00000003" / name
        data = bytearray(file.read_bytes())
        data[random.Random(0).randrange(len(data))] ^= 1
        file.write_bytes(data if damage == "flip" else data[:-1])
        if damage in ("remove", "folder"):
            file.unlink()
        if damage == "folder":
            file.mkdir()
        said: list[str] = []
        made = checkpointer(tmp_path)
        made.say = said.append
        made.reads_in_place = in_place
        loaded = made.load_newest()
        assert loaded is not None
        assert loaded.manifest.state["step"] == 2
        assert len(said) == 1
        assert said[0].startswith(f"checkpoint {tmp_path}/p0000-s00000003 was skipped: {name} ")
        made.save(at(3), learned(3), PROMISED)
        assert newest(tmp_path) == 3

    def test_none_is_left(self, tmp_path: Path) -> None:
        save(tmp_path, [1, 2])
        for step in (1, 2):
            (tmp_path / f"p0000-s0000000{step}" / "state.json").unlink()
        with pytest.raises(NoValidCheckpointError) as caught:
            newest(tmp_path)
        assert caught.value.exit_code == 5
        assert "p0000-s00000001: state.json " in str(caught.value)
        assert "p0000-s00000002" in str(caught.value)

    def test_a_content_of_another_form_is_passed_over(self, tmp_path: Path) -> None:
        save(tmp_path, [1])
        sound = dict(zip(("state.json", "tensors.safetensors"), encode(learned(1)), strict=True))
        promised = {"promised.json": json.dumps(PROMISED).encode()}
        forms = [
            dict(zip(sound, encode([1]), strict=True)) | promised,
            sound | promised | {"state.json": b"{"},
            sound | promised | {"tensors.safetensors": b"\x80\x04\x95pickle"},
            sound,
            promised,
            sound | {"promised.json": b"{"},
            sound | {"promised.json": b"[]"},
            sound | {"promised.json": b"[" * 100_000},
            sound
            | {"state.json": json.dumps({"promised": PROMISED}).encode()},  # as format 1 had it
        ]
        for number, contents in enumerate(forms, 2):
            commit(Storage(), str(tmp_path), contents, described(at(number), number))
        assert newest(tmp_path) == 1
        commit(Storage(), str(tmp_path), sound | promised, described(at(1), 99))
        assert newest(tmp_path) == 1

    def test_without_verification_a_flip_of_the_weights_passes(self, tmp_path: Path) -> None:
        save(tmp_path, [1])
        file = tmp_path / "p0000-s00000001" / "tensors.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        loaded = checkpointer(tmp_path, verify="size").load_newest()
        assert loaded is not None
        assert loaded.state["task"]["model"]["weight"].tolist() != [1.0] * 3
        with pytest.raises(NoValidCheckpointError):
            newest(tmp_path, "full")


class TestLoad:
    def test_by_path(self, tmp_path: Path) -> None:
        save(tmp_path, [1, 2])
        assert (
            checkpointer(tmp_path / "elsewhere")
            .load(f"{tmp_path}/p0000-s00000001/")
            .manifest.state["step"]
            == 1
        )

    def test_what_is_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=f"RUN.checkpoint = '{tmp_path}/none' .*manifest.json"
        ):
            checkpointer(tmp_path).load(f"{tmp_path}/none")

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        save(tmp_path, [1])
        (tmp_path / "p0000-s00000001" / "state.json").write_text(json.dumps({}))
        with raises(ConfigError, code="checkpoint.unusable", key="RUN.checkpoint"):
            checkpointer(tmp_path).load(f"{tmp_path}/p0000-s00000001")


def test_leftovers_are_cleared_and_named(tmp_path: Path) -> None:
    save(tmp_path, [1])
    for name in (
        "p0000-s00000002.tmp-0a1b2c3d",
        ".trash-p0000-s00000000-0a1b2c3d",
        "latest.tmp-0a1b2c3d",
    ):
        (tmp_path / name).mkdir()
    said: list[str] = []
    made = checkpointer(tmp_path)
    made.say = said.append
    made.clear_leftovers()
    assert names(tmp_path) == ["latest", "p0000-s00000001"]
    assert f"{tmp_path}/p0000-s00000002.tmp-0a1b2c3d" in said[-1]
    assert len(said) == 3


def test_format_1_still_loads(tmp_path: Path) -> None:
    """Written as the version before wrote it: what was promised in state.json, a manifest without
    facts."""
    files = {
        "state.json": json.dumps(
            {
                "task": {"model": {"weight": {"$tensor": "task.model.weight"}}},
                "hooks": {},
                "promised": PROMISED,
            }
        ).encode(),
        "tensors.safetensors": save_tensors({"task.model.weight": torch.full((3,), 4.0)}),
    }
    body = {
        "format": 1, "sequence": 6, "run": "0a1b", "parent": None, "state": at(4).state_dict(),
        "files": {name: asdict(FileRecord(len(data), tree_digest(data))) for name, data in files.items()},
    }  # fmt: skip
    digest = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    folder = tmp_path / "p0000-s00000004"
    folder.mkdir()
    for name, data in {
        **files,
        "manifest.json": json.dumps({"body": body, "digest": digest}).encode(),
    }.items():
        (folder / name).write_bytes(data)
    assert newest(tmp_path) == 4
    made = checkpointer(tmp_path)
    loaded = made.load_newest()
    assert loaded is not None
    assert loaded.manifest.facts == Facts()
    assert "promised" not in loaded.state
    assert made.save(at(5), learned(5), PROMISED).manifest.sequence == 7
    assert newest(tmp_path) == 5
    assert made.storage.list_names(str(tmp_path)) == [
        "latest",
        "p0000-s00000004",
        "p0000-s00000005",
    ]


@pytest.mark.parametrize(
    ("part", "healthy"),
    [("model", False), ("loss", False), ("meter.accuracy", True)],
    ids=["model", "loss", "meter"],
)
def test_what_makes_a_checkpoint_unhealthy(tmp_path: Path, part: str, *, healthy: bool) -> None:
    learned = {"task": {part: {"kept": torch.tensor([1.0, float("nan")])}}}
    saved = Checkpointer(str(tmp_path), Storage()).save(RunState(), learned, {})
    assert saved.manifest.facts.healthy == healthy


def test_sharded_checkpoint_is_never_skipped_without_its_add_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, [1])
    sharded = commit(Storage(), str(tmp_path), {INDEX: b"{}"}, described(at(2), 2))
    made = checkpointer(tmp_path)
    monkeypatch.setattr(addons, "load_addons", tuple)
    for call in (
        made.load_newest,
        partial(made.load, f"{tmp_path}/{sharded.name}"),
        partial(made.save_together, World()),
    ):
        with raises(ConfigError, code="addon.missing"):
            call()
