"""One process owns a run folder; what it leaves there is whole, and it goes when the owner does."""

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from phasetrain import folder as module
from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.folder import LEASE_SECONDS, Owner, RunFolder
from phasetrain.storage import Storage

ELSEWHERE = Owner(host="elsewhere", pid=1, started=1, job=None, attempt=3, lease=0.0)

HOLD = """
import sys, time
from phasetrain.folder import RunFolder
RunFolder(sys.argv[1]).open()
print("open", flush=True)
time.sleep(60)
"""


def opened(path: Path, storage: Storage | None = None) -> RunFolder:
    folder = RunFolder(str(path), storage)
    folder.open()
    return folder


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_it_is_created_and_nothing_is_left_after_closing(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == ["owner.json", "run.lock"]
    folder.close()
    assert names(tmp_path / "a" / "b") == []
    folder.close()


def test_paths() -> None:
    assert RunFolder("runs/x/").file("log.txt") == "runs/x/log.txt"


def test_the_owner_record(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    owner = json.loads((tmp_path / "owner.json").read_text())
    assert (owner["host"], owner["pid"], owner["attempt"]) == (socket.gethostname(), os.getpid(), 1)
    assert 0 <= time.time() - owner["lease"] < 60
    folder.close()


class TestStatus:
    def test_content(self, tmp_path: Path) -> None:
        folder = opened(tmp_path)
        folder.write_status("running", updates=0, reason="", exit_code=None)
        folder.write_status("finished", updates=7, exit_code=0)
        status = folder.status()
        heartbeat = status.pop("heartbeat")
        assert status == {"state": "finished", "attempt": 1, "updates": 7, "reason": "", "exit_code": 0}
        assert heartbeat.keys() == {"at", "pid", "host"}
        assert heartbeat["pid"] == os.getpid()
        folder.close()
        assert names(tmp_path) == ["status.json"]

    def test_attempts_are_counted(self, tmp_path: Path) -> None:
        for attempt in (1, 2, 3):
            folder = opened(tmp_path)
            assert folder.attempt == attempt
            folder.write_status("running")
            folder.close()

    def test_a_torn_status_is_as_good_as_none(self, tmp_path: Path) -> None:
        (tmp_path / "status.json").write_text('{"attempt": 4')
        assert RunFolder(str(tmp_path)).status() == {}
        (tmp_path / "status.json").write_text("[1]")
        assert RunFolder(str(tmp_path)).status() == {}

    def test_holding_a_run(self, tmp_path: Path) -> None:
        folder = RunFolder(str(tmp_path / "run"))
        assert not folder.holds_run()
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        assert not folder.holds_run()
        (tmp_path / "run" / "checkpoints" / "p0000-s00000001").mkdir()
        assert folder.holds_run()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "status.json").write_text("{}")
        assert RunFolder(str(tmp_path / "other")).holds_run()

    def test_the_heartbeat_goes_on_and_the_lease_is_renewed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.02)
        folder = opened(tmp_path)
        folder.write_status("running")
        lease = json.loads((tmp_path / "owner.json").read_text())["lease"]
        beat = folder.status()["heartbeat"]["at"]
        end = time.monotonic() + 10
        while folder.status()["heartbeat"]["at"] <= beat and time.monotonic() < end:
            time.sleep(0.01)
        assert folder.status()["heartbeat"]["at"] > beat
        assert json.loads((tmp_path / "owner.json").read_text())["lease"] > lease
        folder.close()
        time.sleep(0.05)
        assert names(tmp_path) == ["status.json"]


class TestLock:
    def test_within_one_process(self, tmp_path: Path) -> None:
        first = opened(tmp_path)
        with pytest.raises(FolderInUseError) as caught:
            opened(tmp_path)
        assert caught.value.exit_code == 4
        assert str(caught.value) == (
            f"RUN.dir = '{tmp_path}' is in use by process {os.getpid()} on {socket.gethostname()} (attempt 1); wait "
            "for it to end, stop it, or give this run a folder of its own with RUN.dir=..."
        )
        assert names(tmp_path) == ["owner.json", "run.lock"]
        first.close()
        opened(tmp_path).close()

    def test_across_processes_until_kill_9(self, tmp_path: Path) -> None:
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "open\n"
            with pytest.raises(FolderInUseError, match=f"is in use by process {holder.pid} on"):
                opened(tmp_path)
            assert names(tmp_path) == ["owner.json", "run.lock"]
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert names(tmp_path) == ["owner.json", "run.lock"]
            opened(tmp_path).close()
            assert names(tmp_path) == []
        finally:
            holder.kill()
            holder.communicate()

    def test_a_forked_worker_does_not_hold_it(self, tmp_path: Path) -> None:
        folder = opened(tmp_path)
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        folder.close()
        try:
            opened(tmp_path).close()
        finally:
            worker.kill()
            worker.join()

    @pytest.mark.parametrize(("age", "refused"), [(0.0, True), (2.9, True), (3.1, False), (-1.0, True)])
    def test_an_owner_on_another_host_has_it_for_three_leases(self, tmp_path: Path, age: float, refused: bool) -> None:
        lease = time.time() - age * LEASE_SECONDS
        (tmp_path / "owner.json").write_text(json.dumps(asdict(replace(ELSEWHERE, lease=lease))))
        if refused:
            with pytest.raises(FolderInUseError, match=r"in use by process 1 on elsewhere \(attempt 3\)"):
                opened(tmp_path)
            assert json.loads((tmp_path / "owner.json").read_text())["host"] == "elsewhere"
        else:
            opened(tmp_path).close()

    @pytest.mark.parametrize(
        ("job", "attempt", "refused"), [("77", 2, False), ("77", 9, True), ("78", 2, True), (None, 2, True)]
    )
    def test_a_later_attempt_of_the_same_job_takes_it_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str | None, attempt: int, refused: bool
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        (tmp_path / "status.json").write_text(json.dumps({"state": "running", "attempt": 2}))
        owner = replace(ELSEWHERE, job=job, attempt=attempt, lease=time.time())
        (tmp_path / "owner.json").write_text(json.dumps(asdict(owner)))
        if refused:
            with pytest.raises(FolderInUseError):
                opened(tmp_path)
        else:
            folder = opened(tmp_path)
            assert folder.attempt == 3
            folder.close()

    def test_another_process_that_got_the_pid_of_a_dead_owner(self, tmp_path: Path) -> None:
        owner = replace(Owner.here(1), started=1)
        (tmp_path / "owner.json").write_text(json.dumps(asdict(owner)))
        opened(tmp_path).close()

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "x"}', "3"])
    def test_a_record_that_cannot_be_read_blocks_nobody(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "owner.json").write_text(text)
        opened(tmp_path).close()


class TestDisk:
    def test_what_a_killed_attempt_was_about_to_put_in_place_is_deleted(self, tmp_path: Path) -> None:
        for name in ("status.json.tmp-0a1b2c3d", "owner.json.tmp-0a1b2c3d", "probe.tmp-0a1b2c3d", "notes.txt"):
            (tmp_path / name).touch()
        opened(tmp_path).close()
        assert names(tmp_path) == ["notes.txt"]

    def test_a_full_disk_at_every_operation(self, tmp_path: Path) -> None:
        refused = []
        for number in range(50):
            root, seen = tmp_path / str(number), [0]

            def failpoint(operation: str, path: str, number: int = number, seen: list[int] = seen) -> None:
                seen[0] += 1
                if seen[0] == number + 1:
                    raise OSError(errno.ENOSPC, "No space left on device")

            try:
                folder = opened(root, Storage(failpoint))
            except ConfigError as error:
                refused.append(str(error))
                assert not root.exists() or names(root) == []
            else:
                seen[0] = number + 1  # what closing does is not refused
                folder.close()
                break
        assert len(refused) > 5
        assert refused[0] == (
            f"RUN.dir = '{tmp_path}/0' cannot be written: No space left on device (errno 28); set RUN.dir to a folder "
            "that this user may write to, on a disk with space left"
        )

    def test_too_little_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10_000, 5_000, 5_000))
        folder = RunFolder(str(tmp_path))
        folder.require(5_000)
        with pytest.raises(ConfigError) as caught:
            folder.require(5_001)
        assert str(caught.value) == (
            f"RUN.dir = '{tmp_path}': 5,000 bytes are free and the checkpoints of this run need about 5,001; free "
            "space, lower CHECKPOINT.keep_last, or set RUN.dir to another disk"
        )

    def test_a_file_stands_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"cannot be written: (File exists|Not a directory) \(errno"):
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
