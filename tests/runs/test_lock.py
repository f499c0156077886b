"""One process at a time writes to a run folder, and a dead one is taken over: by its pid, its
lease, or its job."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from phasetrain.errors import FolderInUseError
from phasetrain.runs import lock
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.lock import FolderLock
from phasetrain.runs.owner import LEASE_SECONDS, Owner, process_age, process_start
from phasetrain.runtime.storage import Storage, open_storage
from phasetrain.testing import MemoryHandler

ELSEWHERE = Owner(host="elsewhere", pid=1, started=1, job=None, attempt=3, lease=0.0)

HOLD = """
import sys, time
from phasetrain.runs import lock
from phasetrain.runs.folder import RunFolder
RunFolder(sys.argv[1]).open()
print("open", flush=True)
time.sleep(60)
"""


def opened(path: Path | str) -> RunFolder:
    folder = RunFolder(str(path))
    folder.open()
    return folder


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


class TestFiles:
    def test_within_one_process(self, tmp_path: Path) -> None:
        first = opened(tmp_path)
        with pytest.raises(FolderInUseError) as caught:
            opened(tmp_path)
        assert caught.value.exit_code == 4
        problem = caught.value.problems[0]
        assert problem.code == "folder.in_use"
        assert problem.message.startswith(f"RUN.dir = '{tmp_path}' ")
        assert f"process {os.getpid()} on {socket.gethostname()} (attempt 1)" in problem.message
        assert names(tmp_path) == ["owner.json", "run.lock"]
        first.close()
        opened(tmp_path).close()

    def test_across_processes_until_kill_9(self, tmp_path: Path) -> None:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "open\n"
            with pytest.raises(FolderInUseError, match=f"process {holder.pid} "):
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

    def test_lock_holds_after_the_owner_has_copied_its_folder(self, tmp_path: Path) -> None:
        # POSIX drops all locks of a process on a file when it closes any handle of the file.
        copying = HOLD.replace("print(", "open(sys.argv[1] + '/run.lock').close()\nprint(")
        holder = subprocess.Popen(
            [sys.executable, "-c", copying, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "open\n"
            with pytest.raises(FolderInUseError, match=f"process {holder.pid} "):
                opened(tmp_path)
            holder.send_signal(signal.SIGKILL)
            # Not waited for: a zombie does not hold the folder.
            while process_start(holder.pid) is not None:
                time.sleep(0.01)
            opened(tmp_path).close()
        finally:
            holder.kill()
            holder.communicate()

    def test_lock_of_a_file_that_another_one_has_replaced_does_not_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lockf = fcntl.lockf

        def release_before(handle: int, operation: int) -> None:
            # The owner ends between our open and our lock, and another process begins.
            (tmp_path / "run.lock").unlink()
            (tmp_path / "run.lock").touch()
            lockf(handle, operation)

        monkeypatch.setattr("fcntl.lockf", release_before)
        with pytest.raises(FolderInUseError):
            opened(tmp_path)

    @pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
    def test_record_alone_locks_on_a_file_system_without_locks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def refuse(*args: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("fcntl.lockf", refuse)
        folder = opened(tmp_path)
        assert names(tmp_path) == ["owner.json"]
        with pytest.raises(FolderInUseError):
            opened(tmp_path)
        folder.close()
        alive = replace(ELSEWHERE, lease=time.time())
        (tmp_path / "owner.json").write_text(json.dumps(asdict(alive)))
        with pytest.raises(FolderInUseError, match="process 1 on elsewhere"):
            opened(tmp_path)

    def test_lock_is_free_while_a_forked_worker_of_the_owner_lives(self, tmp_path: Path) -> None:
        folder = opened(tmp_path)
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        folder.close()
        try:
            again = opened(tmp_path)
            assert worker.is_alive()
            assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()
            again.close()
        finally:
            worker.kill()
            worker.join()

    @pytest.mark.parametrize(
        ("age", "refused"), [(0.0, True), (2.9, True), (121, False), (-1.0, True)]
    )
    def test_an_owner_on_another_host_has_it_for_three_leases(
        self, tmp_path: Path, age: float, refused: bool
    ) -> None:
        lease = time.time() - age * LEASE_SECONDS
        (tmp_path / "owner.json").write_text(json.dumps(asdict(replace(ELSEWHERE, lease=lease))))
        if refused:
            with pytest.raises(FolderInUseError, match=r"process 1 on elsewhere \(attempt 3\)"):
                opened(tmp_path)
            assert json.loads((tmp_path / "owner.json").read_text())["host"] == "elsewhere"
        else:
            opened(tmp_path).close()

    @pytest.mark.parametrize("age", [-4.0, 3.1, 100.0])
    def test_an_owner_whose_clock_differs_keeps_it_while_it_renews(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float
    ) -> None:
        monkeypatch.setattr("phasetrain.runs.lock.POLL_SECONDS", 0.01)
        monkeypatch.setattr("phasetrain.runs.lock.WATCHED_SECONDS", 0.1)
        record = tmp_path / "owner.json"
        dead = replace(ELSEWHERE, lease=time.time() - age * LEASE_SECONDS)
        record.write_text(json.dumps(asdict(dead)))
        opened(tmp_path).close()
        record.write_text(json.dumps(asdict(dead)))
        monkeypatch.setattr("phasetrain.runs.lock.WATCHED_SECONDS", 60)
        renewed = json.dumps(asdict(replace(dead, lease=dead.lease + LEASE_SECONDS)))
        monkeypatch.setattr(
            "phasetrain.runs.lock.time.sleep", lambda seconds: record.write_text(renewed)
        )
        with pytest.raises(FolderInUseError, match="process 1 on elsewhere"):
            opened(tmp_path)
        assert record.read_text() == renewed

    @pytest.mark.parametrize(
        ("job", "attempt", "refused"),
        [("77", 2, False), ("77", 9, True), ("78", 2, True), (None, 2, True)],
    )
    def test_a_later_attempt_of_the_same_job_takes_it_over(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        job: str | None,
        attempt: int,
        refused: bool,
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

    def test_process_with_the_pid_of_a_dead_owner_takes_the_folder_over(
        self, tmp_path: Path
    ) -> None:
        owner = replace(Owner.here(1), started=1)
        (tmp_path / "owner.json").write_text(json.dumps(asdict(owner)))
        folder = opened(tmp_path)
        assert json.loads((tmp_path / "owner.json").read_text())["started"] != 1
        folder.close()

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "x"}', "3"])
    def test_unreadable_record_is_replaced(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "owner.json").write_text(text)
        folder = opened(tmp_path)
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()
        folder.close()


@pytest.mark.addon("remote")
class TestObjects:
    """On an object store the record is all there is: no kernel drops a lock there."""

    @pytest.fixture(autouse=True)
    def empty(self) -> Iterator[None]:
        MemoryHandler.objects.clear()
        yield
        MemoryHandler.objects.clear()

    def put(self, owner: Owner) -> None:
        MemoryHandler.objects["mem://run/owner.json"] = json.dumps(asdict(owner)).encode()

    def test_it_is_taken_and_given_up(self) -> None:
        folder = opened("mem://run")
        assert list(MemoryHandler.objects) == ["mem://run/owner.json"]
        with pytest.raises(
            FolderInUseError, match=f"process {os.getpid()} on {socket.gethostname()}"
        ):
            opened("mem://run")
        folder.close()
        assert MemoryHandler.objects == {}
        opened("mem://run").close()

    def test_a_living_process_of_this_host_has_it_and_a_dead_one_does_not(self) -> None:
        holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            owner = replace(
                Owner.here(1), pid=holder.pid, started=process_start(holder.pid), lease=0.0
            )
            self.put(owner)
            with pytest.raises(FolderInUseError, match=f"process {holder.pid} "):
                opened("mem://run")
            self.put(replace(owner, started=1))  # another process got the pid of a dead one
            opened("mem://run").close()
        finally:
            holder.kill()
            holder.communicate()
        self.put(owner)
        opened("mem://run").close()

    @pytest.mark.parametrize(("age", "refused"), [(0.0, True), (2.9, True), (121, False)])
    def test_an_owner_on_another_host_has_it_for_three_leases(
        self, age: float, refused: bool
    ) -> None:
        self.put(replace(ELSEWHERE, lease=time.time() - age * LEASE_SECONDS))
        if refused:
            with pytest.raises(FolderInUseError) as caught:
                opened("mem://run")
            left = int(str(caught.value).partition("taken over in ")[2].split()[0])
            assert abs(left - (3 - age) * LEASE_SECONDS) < 3
        else:
            opened("mem://run").close()

    def test_a_later_attempt_of_the_same_job_takes_it_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        MemoryHandler.objects["mem://run/status.json"] = b'{"state": "running", "attempt": 3}'
        self.put(replace(ELSEWHERE, job="77", lease=time.time()))
        folder = opened("mem://run")
        assert folder.attempt == 4
        folder.close()


def test_somebody_who_writes_the_record_at_the_same_moment_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, lock = replace(ELSEWHERE, lease=time.time()), FolderLock(str(tmp_path), Storage())
    real = Storage.replace_json

    def overtaken(door: Storage, path: str, content: object, *, durable: bool = True) -> None:
        real(door, path, content, durable=durable)
        real(door, path, asdict(other), durable=durable)

    monkeypatch.setattr(Storage, "replace_json", overtaken)
    with pytest.raises(FolderInUseError, match="process 1 on elsewhere"):
        lock.take(Owner.here(1))
    lock.release()
    assert json.loads((tmp_path / "owner.json").read_text()) == asdict(other)
    assert [
        name for name in os.listdir("/proc/self/fd") if points_to(name, tmp_path / "run.lock")
    ] == []


def test_a_folder_that_was_taken_over_is_left_to_its_new_owner(tmp_path: Path) -> None:
    lock, other = FolderLock(str(tmp_path), Storage()), replace(ELSEWHERE, lease=time.time())
    lock.take(Owner.here(1))
    lock.renew(Owner.here(1))
    (tmp_path / "owner.json").write_text(json.dumps(asdict(other)))
    with pytest.raises(FolderInUseError, match="process 1 on elsewhere"):
        lock.renew(Owner.here(1))
    lock.release()
    assert json.loads((tmp_path / "owner.json").read_text()) == asdict(other)


def test_a_record_that_is_gone_or_torn_is_written_anew(tmp_path: Path) -> None:
    lock = FolderLock(str(tmp_path), Storage())
    lock.take(Owner.here(1))
    for content in ("", "{"):
        (tmp_path / "owner.json").write_text(content)
        lock.renew(Owner.here(1))
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()
    lock.release()
    assert names(tmp_path) == []


def points_to(handle: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{handle}") == str(path)  # noqa: PTH115
    except OSError:
        return False


def test_the_age_of_a_process() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid()) != process_start(1)
    assert process_start(2**22 + 1) is None
    before = process_age()
    assert 0 < before < 24 * 3600
    assert process_age() >= before


@pytest.mark.addon("remote")
class TestClaims:
    """Processes that start at the same moment in an object store, which has no locks."""

    @pytest.fixture(autouse=True)
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(lock, "CLAIM_SECONDS", 0.002)
        yield
        MemoryHandler.objects.clear()

    @pytest.mark.feature("remote.run_folder")
    def test_processes_that_start_at_the_same_moment(self) -> None:
        winners = []
        for number in range(20):
            folder = f"mem://claims/{number}"
            together = threading.Barrier(3)
            held: list[str] = []

            def take(host: str, folder: str, together: threading.Barrier, held: list[str]) -> None:
                # A slow store: other threads act between any two requests.
                storage = open_storage(folder, lambda operation, path: time.sleep(0.0005))
                together.wait()
                try:
                    FolderLock(folder, storage).take(
                        replace(ELSEWHERE, host=host, lease=time.time())
                    )
                except FolderInUseError:
                    return
                held.append(host)

            threads = [
                threading.Thread(target=take, args=(host, folder, together, held))
                for host in ("one", "two", "three")
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            owner = json.loads(MemoryHandler.objects[f"{folder}/owner.json"])["host"]
            assert held == [owner]
            assert list(open_storage(folder).list_names(folder)) == ["owner.json"]
            winners += held
        assert len(winners) == 20

    def test_record_that_appears_after_the_first_look_counts(self) -> None:
        folder = "mem://claims/late"
        other = replace(ELSEWHERE, lease=time.time())

        def start_other(operation: str, path: str) -> None:
            if operation == "write" and "claim" in path and "owner.json" not in str(seen):
                seen.append("owner.json")
                FolderLock(folder, open_storage(folder)).take(other)

        seen: list[str] = []
        with pytest.raises(FolderInUseError, match="elsewhere"):
            FolderLock(folder, open_storage(folder, start_other)).take(Owner.here(1))

    def test_claim_of_a_live_process_keeps_others_out_and_that_of_a_dead_one_does_not(self) -> None:
        path = "mem://claims/x/claim.tmp-00000000"
        claim = replace(ELSEWHERE, lease=time.time())
        MemoryHandler.objects[path] = json.dumps(asdict(claim)).encode()
        with pytest.raises(FolderInUseError, match="elsewhere"):
            opened("mem://claims/x")
        claim = replace(ELSEWHERE, lease=time.time() - 200)
        MemoryHandler.objects[path] = json.dumps(asdict(claim)).encode()
        opened("mem://claims/x").close()
        assert [name for name in MemoryHandler.objects if "claims/x" in name] == []
