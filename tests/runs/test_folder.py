"""One process owns a run folder; what it leaves there is whole, and it goes when the owner does."""

import errno
import json
import multiprocessing
import os
import socket
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from failpoints import Failpoint
from failpoints import refused as refusal
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.runs import folder as module
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.owner import Owner
from phasetrain.runs.records import StatusRecord
from phasetrain.runtime.storage import Storage


def opened(path: Path, storage: Storage | None = None) -> RunFolder:
    folder = RunFolder(str(path), storage)
    folder.open()
    return folder


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_it_is_created_and_nothing_is_left_after_closing(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == ["owner.json", "run.lock"]
    folder.close()
    assert names(tmp_path / "a" / "b") == []
    folder.close()


def test_paths_do_not_depend_on_a_later_working_directory() -> None:
    folder = RunFolder("runs/x/")
    assert folder.path == "runs/x"
    assert folder.file("log.txt") == str(Path("runs/x/log.txt").absolute())


@pytest.mark.addon("remote")
def test_path_in_an_object_store_stays_as_it_is() -> None:
    assert RunFolder("mem://x/").file("log.txt") == "mem://x/log.txt"


def test_the_owner_record(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    owner = json.loads((tmp_path / "owner.json").read_text())
    assert (owner["host"], owner["pid"], owner["attempt"]) == (socket.gethostname(), os.getpid(), 1)
    assert 0 <= time.time() - owner["lease"] < 60
    folder.close()


def test_what_is_left_for_the_end_is_done_once_under_the_lock_and_the_last_one_first(
    tmp_path: Path,
) -> None:
    folder, done = opened(tmp_path), list[tuple[str, bool]]()
    for name in "ab":
        folder.before_close.append(
            lambda name=name: done.append((name, (tmp_path / "run.lock").exists()))
        )
    folder.close()
    folder.close()
    assert done == [("b", True), ("a", True)]


def test_nothing_is_done_at_the_end_in_a_folder_that_was_taken_over(tmp_path: Path) -> None:
    folder, done = opened(tmp_path), list[str]()
    folder.before_close.append(lambda: done.append("a"))
    folder.lost = "somebody else has it"
    folder.close()
    assert done == []


def test_attempts_that_ended_are_remembered_whatever_their_end(tmp_path: Path) -> None:
    time = {"attempt": {"train": 1.5}, "run": {"train": 9.0}}
    for state in ("failed", "running", "finished"):
        folder = opened(tmp_path)
        folder.write_status(state, reason="x", updates=3, time=time)
        folder.close()
    lines = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [(one["attempt"], one["state"], one["updates"], one["time"]) for one in lines] == [
        (1, "failed", 3, {"attempt": {"train": 1.5}}),
        (2, "running", 3, {"attempt": {"train": 1.5}}),
    ]


class TestStatus:
    def test_content(self, tmp_path: Path) -> None:
        folder = opened(tmp_path)
        folder.write_status("running", updates=0, reason="", exit_code=None)
        folder.write_status("finished", updates=7, exit_code=0)
        status = dict(folder.read_status().content)
        heartbeat = status.pop("heartbeat")
        assert status == {
            "state": "finished",
            "attempt": 1,
            "updates": 7,
            "reason": "",
            "exit_code": 0,
        }
        assert heartbeat.keys() == {"at", "pid", "host"}
        assert heartbeat["pid"] == os.getpid()
        folder.close()
        assert names(tmp_path) == ["status.json"]

    def test_what_stays_from_attempt_to_attempt(self, tmp_path: Path) -> None:
        folder = opened(tmp_path)
        folder.write_status(
            "failed", updates=7, checkpoint="p0001", digest="0a", reason="x", exit_code=1
        )
        folder.close()
        again = opened(tmp_path)
        again.note(save_failures=1)
        assert (
            again.read_status().state == "failed"
        )  # that of the attempt before stands until this one has its own
        again.write_status("running")
        status = again.read_status().content
        again.close()
        assert {key: status.get(key) for key in ("updates", "checkpoint", "digest", "reason", "save_failures")} == {
            "updates": 7, "checkpoint": "p0001", "digest": None, "reason": None, "save_failures": 1,
        }  # fmt: skip

    def test_the_watch_is_asked_whenever_it_is_written(self, tmp_path: Path) -> None:
        folder, seen = opened(tmp_path), iter(range(5))
        folder.status_file.collect = lambda: {"updates": next(seen)}
        folder.write_status("running")
        folder.note(checkpoint="p0001")
        assert (
            folder.read_status().content["updates"],
            folder.read_status().content["checkpoint"],
        ) == (1, "p0001")
        folder.close()

    def test_what_a_full_disk_refused_is_written_with_the_next_heartbeat(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.02)
        failpoint = Failpoint(None, refusal(errno.ENOSPC))
        folder = opened(tmp_path, Storage(failpoint))
        folder.write_status("running")
        failpoint.number, failpoint.lasting = 0, True
        folder.note(save_failures=3)
        with pytest.raises(OSError, match="No space left"):
            folder.write_status("running")
        assert json.loads((tmp_path / "status.json").read_text()).get("save_failures") is None
        failpoint.number = None
        wait_for(
            lambda: json.loads((tmp_path / "status.json").read_text()).get("save_failures") == 3
        )
        folder.close()
        assert names(tmp_path) == ["status.json"]

    def test_nothing_is_written_once_somebody_else_has_taken_the_folder_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.02)
        folder = opened(tmp_path)
        folder.write_status("running")
        other = asdict(replace(Owner.here(2), host="elsewhere"))

        def take_over() -> bool:
            # Again and again: the folder may be about to renew its own entry after it was read.
            (tmp_path / "owner.json").write_text(json.dumps(other))
            time.sleep(0.1)
            return bool(folder.lost)

        wait_for(take_over)
        (tmp_path / "status.json").write_text("theirs")
        folder.note(save_failures=1)
        folder.write_status("failed", exit_code=4)
        folder.close()
        assert folder.lost.startswith(f"RUN.dir = '{tmp_path}' ")
        assert f" process {os.getpid()} on elsewhere" in folder.lost
        assert (tmp_path / "status.json").read_text() == "theirs"
        assert json.loads((tmp_path / "owner.json").read_text()) == other

    def test_attempts_are_counted(self, tmp_path: Path) -> None:
        for attempt in (1, 2, 3):
            folder = opened(tmp_path)
            assert folder.attempt == attempt
            folder.write_status("running")
            folder.close()

    def test_a_torn_status_is_as_good_as_none(self, tmp_path: Path) -> None:
        (tmp_path / "status.json").write_text('{"attempt": 4')
        assert RunFolder(str(tmp_path)).read_status() == StatusRecord()
        (tmp_path / "status.json").write_text("[1]")
        assert RunFolder(str(tmp_path)).read_status() == StatusRecord()

    def test_holding_a_run(self, tmp_path: Path) -> None:
        folder = RunFolder(str(tmp_path / "run"))
        assert not folder.has_run()
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        assert not folder.has_run()
        (tmp_path / "run" / "checkpoints" / "p0000-s00000001").mkdir()
        assert folder.has_run()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "status.json").write_text("{}")
        assert RunFolder(str(tmp_path / "other")).has_run()

    def test_the_heartbeat_goes_on_and_the_lease_is_renewed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.02)
        folder = opened(tmp_path)
        folder.write_status("running")
        lease = json.loads((tmp_path / "owner.json").read_text())["lease"]
        beat = folder.read_status().content["heartbeat"]["at"]
        wait_for(lambda: folder.read_status().content["heartbeat"]["at"] > beat)
        assert json.loads((tmp_path / "owner.json").read_text())["lease"] > lease
        folder.close()
        time.sleep(0.05)
        assert names(tmp_path) == ["status.json"]


class TestDisk:
    def test_what_a_killed_attempt_was_about_to_put_in_place_is_deleted(
        self, tmp_path: Path
    ) -> None:
        for name in (
            "status.json.tmp-0a1b2c3d",
            "owner.json.tmp-0a1b2c3d",
            "probe.tmp-0a1b2c3d",
            "notes.txt",
        ):
            (tmp_path / name).touch()
        opened(tmp_path).close()
        assert names(tmp_path) == ["notes.txt"]

    def test_a_full_disk_at_every_operation(self, tmp_path: Path) -> None:
        refused = []
        for number in range(50):
            root, failpoint = tmp_path / str(number), Failpoint(number, refusal(errno.ENOSPC))
            try:
                folder = opened(root, Storage(failpoint))
            except ConfigError as error:
                refused.append(str(error))
                assert not root.exists() or names(root) == []
            else:
                read_only = failpoint.raised  # a status.json that cannot be read is refused as well
                failpoint.number = None  # what closing does is not refused
                folder.close()
                assert not read_only
                break
        assert len(refused) > 8
        assert refused[0].startswith(f"RUN.dir = '{tmp_path}/0' ")
        assert "(errno 28)" in refused[0]

    def test_too_little_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10_000, 5_000, 5_000))
        folder = RunFolder(str(tmp_path))
        sentence = (
            f"RUN.dir = '{tmp_path}': 5,000 bytes are free and the checkpoints of this run need about 9,000; free "
            "space, lower CHECKPOINT.keep_last, or set RUN.dir to another disk"
        )
        with caplog.at_level("WARNING", "phasetrain"):
            folder.space.require(2_000, 5_000)
            assert caplog.messages == []
            folder.space.require(5_000, 9_000)
            assert caplog.messages == [sentence]
            with pytest.raises(ConfigError) as caught:
                folder.space.require(5_001, 9_000)
        assert str(caught.value) == sentence

    @pytest.mark.addon("remote")
    def test_where_nobody_can_tell_the_room_nothing_is_refused(self) -> None:
        RunFolder("mem://run").space.require(10**18, 10**18)

    def test_a_file_stands_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with raises(ConfigError, key="RUN.dir"):
            opened(tmp_path / "file")

    def test_a_folder_that_may_not_be_written(self, tmp_path: Path) -> None:
        target = tmp_path / "readonly"
        target.mkdir()
        target.chmod(0o555)
        for parent in (tmp_path, *tmp_path.parents[:2]):
            parent.chmod(parent.stat().st_mode | 0o755)
        found = run_as_nobody(target)
        assert "ConfigError" in found
        assert "cannot be written: Permission denied (errno 13)" in found
        assert names(target) == []


def run_as_nobody(path: Path) -> Any:
    """Open a folder in a child without the rights of root, and return what it raised."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            opened(path).close()
            queue.put("nothing")
        except ConfigError as error:
            queue.put(f"ConfigError {error}")

    process = context.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    return queue.get()
