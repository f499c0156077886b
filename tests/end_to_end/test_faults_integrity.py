"""Damaged or mixed-up checkpoints, wrong pointers and clocks: the newest intact checkpoint is
used."""

import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged import NEWEST, OLDEST, PREVIOUS, newest_valid_name
from failing_calls import Fault
from faulty import ONE, Starter
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    run_until_killed,
    train,
)

from phasetrain.app.api import run
from phasetrain.checkpoint import Checkpointer
from phasetrain.errors import NoValidCheckpointError
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal

FILES = ("tensors.safetensors", "state.json", "promised.json", "manifest.json")


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file; a second call restores it."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def resume_and_capture(folder: Path, *words: str) -> str:
    """Resume a run and return its output."""
    output = io.StringIO()
    result = run([*SMALL, ONE, f"RUN.dir={folder}", *words], terminal=Terminal(output, live=False))
    assert (result.state, result.exit_code) == ("finished", 0)
    return output.getvalue()


def test_flipped_bit_is_reported_on_the_command_line(
    starter: Starter, unbroken: Path, killed_copy: Path
) -> None:
    tensors = killed_copy / "checkpoints" / NEWEST / "tensors.safetensors"
    flip_bit(tensors, 8 * tensors.stat().st_size - 7)
    record = json.loads((tensors.parent / "manifest.json").read_text())["body"]["files"][
        tensors.name
    ]
    ended = starter.run(killed_copy, *SMALL, ONE)
    assert ended.code == 0, ended.output
    text = " ".join(ended.output.split())
    assert all(part in text for part in (NEWEST, tensors.name, record["digest"]))
    assert f"{killed_copy}/checkpoints/{PREVIOUS} " in text
    assert differences_of_runs(unbroken, killed_copy) == []
    assert leftovers(killed_copy) == []


class TestDamage:
    @pytest.mark.by_default(2)
    @pytest.mark.parametrize("name", FILES)
    def test_flipped_bits_are_detected(self, killed_copy: Path, name: str) -> None:
        path = killed_copy / "checkpoints" / NEWEST / name
        assert newest_valid_name(killed_copy) == NEWEST  # before any
        dice = random.Random(name)
        for bit in dice.sample(range(8 * path.stat().st_size), 100):
            flip_bit(path, bit)
            assert newest_valid_name(killed_copy) == PREVIOUS, f"bit {bit}"
            flip_bit(path, bit)
        assert newest_valid_name(killed_copy) == NEWEST

    @pytest.mark.parametrize("name", FILES)
    def test_truncated_file_is_detected(self, killed_copy: Path, name: str) -> None:
        path = killed_copy / "checkpoints" / NEWEST / name
        content = path.read_bytes()
        for sixteenth in range(16):
            path.write_bytes(content[: len(content) * sixteenth // 16])
            assert newest_valid_name(killed_copy) == PREVIOUS, f"{sixteenth} sixteenths"
        path.write_bytes(content)
        assert newest_valid_name(killed_copy) == NEWEST

    @pytest.mark.parametrize("name", FILES)
    def test_file_that_is_longer_missing_or_a_folder_is_detected(
        self, killed_copy: Path, name: str
    ) -> None:
        path = killed_copy / "checkpoints" / NEWEST / name
        content = path.read_bytes()
        path.write_bytes(content + b"\0")
        assert newest_valid_name(killed_copy) == PREVIOUS
        path.unlink()
        assert newest_valid_name(killed_copy) == PREVIOUS
        path.mkdir()
        assert newest_valid_name(killed_copy) == PREVIOUS
        path.rmdir()
        path.symlink_to(path)
        assert newest_valid_name(killed_copy) == PREVIOUS
        path.unlink()
        path.write_bytes(content)
        assert newest_valid_name(killed_copy) == NEWEST

    @pytest.mark.parametrize("name", FILES[:3])
    def test_file_exchanged_with_another_checkpoint_is_detected(
        self, killed_copy: Path, name: str
    ) -> None:
        one, other = (killed_copy / "checkpoints" / folder / name for folder in (NEWEST, PREVIOUS))
        if one.read_bytes() == other.read_bytes():
            assert name == "promised.json"  # the same content in both: nothing is mixed up
            return
        shutil.move(one, killed_copy / "aside")
        shutil.move(other, one)
        shutil.move(killed_copy / "aside", other)
        assert newest_valid_name(killed_copy) == OLDEST

    def test_position_comes_from_the_manifest_and_not_from_the_folder_name(
        self, unbroken: Path, killed_copy: Path
    ) -> None:
        """Position and commit number are in the manifest; the folder name does not count."""
        one, other = (killed_copy / "checkpoints" / folder for folder in (NEWEST, PREVIOUS))
        one.rename(killed_copy / "aside")
        other.rename(one)
        (killed_copy / "aside").rename(other)
        assert newest_valid_name(killed_copy) == PREVIOUS
        assert newest(killed_copy).manifest.state["step"] == 2
        resume_and_capture(killed_copy)
        assert differences_of_runs(unbroken, killed_copy) == []

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        "copy", [f"{NEWEST}-c99", "p0009-s00000000", f"{NEWEST} (copy)", f"{NEWEST}.bak"]
    )
    def test_copy_of_an_old_checkpoint_under_a_higher_name_is_not_newest(
        self, unbroken: Path, killed_copy: Path, copy: str
    ) -> None:
        shutil.copytree(killed_copy / "checkpoints" / PREVIOUS, killed_copy / "checkpoints" / copy)
        assert newest_valid_name(killed_copy) == NEWEST
        resume_and_capture(killed_copy)
        assert differences_of_runs(unbroken, killed_copy) == []

    def test_foreign_files_are_ignored_and_kept(self, unbroken: Path, killed_copy: Path) -> None:
        root = killed_copy / "checkpoints"
        (root / NEWEST / "rank1.safetensors").write_bytes(b"stale")
        (root / NEWEST / "more").mkdir()
        (root / "p0009-s00000000").mkdir()
        (root / "p0009-s00000001").write_bytes(b"a file")
        (root / "notes.txt").write_text("mine")
        assert newest_valid_name(killed_copy) == NEWEST
        resume_and_capture(killed_copy)
        assert differences_of_runs(unbroken, killed_copy) == []
        assert (root / "notes.txt").exists()

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("damaged", [(NEWEST, PREVIOUS), (NEWEST,)])
    def test_run_resumes_exactly_past_damaged_checkpoints(
        self, unbroken: Path, killed_copy: Path, damaged: tuple[str, ...]
    ) -> None:
        for name in damaged:
            path = killed_copy / "checkpoints" / name / "state.json"
            path.write_bytes(path.read_bytes()[:-1])
        text = resume_and_capture(killed_copy)
        assert all(name in text for name in (*damaged, "state.json"))
        assert differences_of_runs(unbroken, killed_copy) == []
        assert leftovers(killed_copy) == []

    def test_without_verification_a_flip_is_not_seen(self, killed_copy: Path) -> None:
        """Negative control: only the digest detects a flipped bit."""
        path = killed_copy / "checkpoints" / NEWEST / "tensors.safetensors"
        flip_bit(path, 8 * path.stat().st_size - 7)
        checkpointer = Checkpointer(f"{killed_copy}/checkpoints", Storage(), verify="size")
        loaded = checkpointer.load_newest()
        assert loaded is not None
        assert Path(loaded.path).name == NEWEST


class TestThePointer:
    """`latest` is only a hint for people."""

    LIES: dict[str, Callable[[Path], object]] = {
        "missing": lambda latest: None,
        "dangling": lambda latest: latest.symlink_to("p0042-s00000000"),
        "looping": lambda latest: latest.symlink_to("latest"),
        "folder": lambda latest: (latest.mkdir(), (latest / "inside").touch()),
        "garbage": lambda latest: latest.write_bytes(b"\xff\0garbage"),
        "older": lambda latest: latest.write_text("p0001-s00000002"),
        "out": lambda latest: latest.write_text("../../../etc"),
    }

    @pytest.mark.by_default("looping")
    @pytest.mark.parametrize("lie", LIES)
    def test_newest_checkpoint_is_used_whatever_the_pointer_says(
        self, unbroken: Path, killed_copy: Path, lie: str
    ) -> None:
        latest = killed_copy / "checkpoints" / "latest"
        latest.unlink()
        self.LIES[lie](latest)
        assert f" {killed_copy}/checkpoints/{NEWEST} " in resume_and_capture(killed_copy)
        if lie != "folder":  # a folder may belong to the user; it stays, with a warning
            assert latest.read_text() == "p0006-s00000000"
        assert differences_of_runs(unbroken, killed_copy) == []

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(("path", "number"), [("checkpoints/latest", 3), ("status.json", 5)])
    def test_killed_between_commit_and_pointer(
        self, unbroken: Path, tmp_path: Path, starter: Starter, path: str, number: int
    ) -> None:
        if not starter.faults:
            pytest.skip(
                "a kill within a system call needs a library that gcc compiles, and there is no gcc"
            )
        folder = tmp_path / "run"
        words = (*SMALL, ONE, "CHECKPOINT.every_updates=2")
        killed = Fault("rename", f"/run/{path}", "KILL", number, number)
        assert starter.run(folder, *words, faults=(killed,)).code == -9
        known = json.loads((folder / "status.json").read_text())["checkpoint"]
        latest, now = (folder / "checkpoints/latest").read_text(), newest_valid_name(folder)
        assert known < now  # status.json is behind
        assert (latest < now) == path.endswith("latest")
        assert starter.run(folder, *words).code == 0
        assert (folder / "checkpoints/latest").read_text() == "p0006-s00000000"
        assert differences_of_runs(unbroken, folder) == []
        assert leftovers(folder) == []


class TestTheClock:
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
    def test_clock_jumps_change_no_bit(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
    ) -> None:
        clock, jumps = time.time, [0.0]

        def jumping() -> float:
            jumps[0] += jump
            return clock() + jumps[0]

        monkeypatch.setattr(time, "time", jumping)
        for steps in (3, 4):
            run_until_killed(
                tmp_path, ONE, hooks={"save": SaveEachStep(), "kill": KillAfter(steps)}
            )
        assert newest(tmp_path).manifest.state["updates"] == 5  # 3, then 2 and two of a test
        train(tmp_path, ONE)
        assert differences_of_runs(unbroken, tmp_path) == []

    @pytest.mark.parametrize("times", ["equal", "reversed"])
    def test_file_times_do_not_matter(self, killed_copy: Path, times: str) -> None:
        for age, folder in enumerate(sorted((killed_copy / "checkpoints").glob("p*"))):
            for path in (*folder.iterdir(), folder):
                when = 1e9 if times == "equal" else 1e9 - 3600 * age
                os.utime(path, (when, when))
        assert newest_valid_name(killed_copy) == NEWEST


class TestOnlyDamagedOnes:
    @pytest.fixture
    def ruined(self, killed_copy: Path) -> Path:
        for path in killed_copy.glob("checkpoints/p*/tensors.safetensors"):
            flip_bit(path, 4000)
        return killed_copy

    def test_run_does_not_restart_by_itself(self, ruined: Path, starter: Starter) -> None:
        before = sorted(ruined.glob("checkpoints/p*/*"))
        status = (ruined / "status.json").read_bytes()
        with pytest.raises(NoValidCheckpointError):
            newest(ruined)
        ended = starter.run(ruined, *SMALL, ONE)
        assert ended.code == 5
        assert "RUN.allow=no_valid" in ended.output
        assert sorted(ruined.glob("checkpoints/p*/*")) == before
        # A refused command leaves no attempt.
        assert (ruined / "status.json").read_bytes() == status
        assert (ended.alive, leftovers(ruined)) == ([], [])

    def test_run_restarts_with_consent(self, unbroken: Path, ruined: Path) -> None:
        assert "RUN.allow" in resume_and_capture(ruined, "RUN.allow=[no_valid]")
        assert differences_of_runs(unbroken, ruined) == []


class TestTornLogs:
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("torn", [b'{"kind": "st', b"\xff\xfe\0", b"x" * 10_000])
    def test_lines_beyond_the_checkpoint_are_cut_off(
        self, unbroken: Path, killed_copy: Path, torn: bytes
    ) -> None:
        for name in ("metrics.jsonl", "steps.ledger", "log.txt"):
            with (killed_copy / name).open("ab") as file:
                file.write(torn)
        resume_and_capture(killed_copy)
        assert differences_of_runs(unbroken, killed_copy) == []
        assert (killed_copy / "steps.ledger").read_bytes() == (
            unbroken / "steps.ledger"
        ).read_bytes()
        last = (killed_copy / "log.txt").read_bytes().splitlines()[-1]
        assert json.loads((killed_copy / "status.json").read_text())["digest"].encode() in last
        assert not last.startswith(torn)

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("torn", ["", "{", "[]", '{"attempt": "x", "time": 3}', "\0"])
    def test_torn_status_is_ignored(self, unbroken: Path, killed_copy: Path, torn: str) -> None:
        (killed_copy / "status.json").write_text(torn)
        resume_and_capture(killed_copy)
        assert differences_of_runs(unbroken, killed_copy) == []
        assert json.loads((killed_copy / "status.json").read_text())["state"] == "finished"
