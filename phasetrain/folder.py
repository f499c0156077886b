"""The run folder: everything that a run leaves behind, who owns it, and what its status is (section RUN)."""

import fcntl
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.storage import TEMPORARY, Storage

OWN_FILES = ("RUN.md", "config.yaml", "overrides.yaml", "environment.json", "metrics.jsonl", "reproduce.sh")
"""Files that a run writes anew or appends to."""

LEASE_SECONDS = 30.0
"""How often an owner renews its lease; one that is three times as old has expired."""


@dataclass(frozen=True)
class Owner:
    """Who writes to a run folder.

    Attributes:
        host, pid: machine and process.
        started: start time of the process in clock ticks since boot, which tells apart two processes that got
            the same pid; None where the system does not say.
        job: id of the job under the cluster's scheduler, or None.
        attempt: how many times the run was started.
        lease: seconds since 1970 at which the owner was last alive.
    """

    host: str
    pid: int
    started: int | None
    job: str | None
    attempt: int
    lease: float

    @classmethod
    def here(cls, attempt: int) -> "Owner":
        """Return the record of this process."""
        job = os.environ.get("SLURM_JOB_ID")
        return cls(socket.gethostname(), os.getpid(), _process_start(os.getpid()), job, attempt, time.time())

    def blocks(self, other: "Owner") -> bool:
        """Tell whether `other` must not take the folder over, the file lock of this host being free."""
        if self.host == other.host:
            return (self.pid, self.started) == (other.pid, other.started)
        if self.job is not None and self.job == other.job and other.attempt > self.attempt:
            return False
        return other.lease - self.lease < 3 * LEASE_SECONDS


class RunFolder:
    """A run folder under the lock of this process.

    Args:
        path: the folder; created if need be.
        storage: the door to its files.
    """

    def __init__(self, path: str, storage: Storage | None = None) -> None:
        self.path = path.rstrip("/")
        self.storage = storage or Storage()
        self.attempt = 1
        self._lock: int | None = None
        self._closing = threading.Event()
        self._guard = threading.Lock()
        self._status: dict[str, Any] = {}

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.path}/{name}"

    def holds_run(self) -> bool:
        """Tell whether a run has written here."""
        return self.storage.exists(self.file("status.json")) or bool(self.storage.names(self.file("checkpoints")))

    def status(self) -> dict[str, Any]:
        """Return the content of status.json, empty where there is none."""
        found = self.storage.read_json(self.file("status.json"))
        return found if isinstance(found, dict) else {}

    def open(self) -> None:
        """Create the folder, see that it can be written, and take its lock.

        Raises:
            ConfigError: the folder cannot be created or written.
            FolderInUseError: another process owns it.
        """
        self._refuse_strangers()
        self._probe()
        before = self.status()
        self.attempt = _count(before, "attempt") + 1
        self._status = {"updates": _count(before, "updates")}
        try:
            self._take(Owner.here(self.attempt))
            self._sweep()
        except OSError as error:
            self.close()
            raise self._not_writable(error) from error
        threading.Thread(target=self._renew, name="phasetrain-lease", daemon=True).start()

    def require(self, needed: int) -> None:
        """See that the disk has room for what the run is going to write, in bytes.

        Raises:
            ConfigError: it has not; both figures are in the message.
        """
        free = shutil.disk_usage(self.storage.local(self.path)).free
        if free < needed:
            raise ConfigError(
                f"RUN.dir = {self.path!r}: {free:,} bytes are free and the checkpoints of this run need about "
                f"{needed:,}; free space, lower CHECKPOINT.keep_last, or set RUN.dir to another disk"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an error of the file system into a sentence about RUN.dir."""
        try:
            yield
        except OSError as error:
            raise self._not_writable(error) from error

    def write_status(self, state: str, **facts: Any) -> None:
        """Write status.json: the state, the attempt, a heartbeat and `facts`, which are kept until set anew."""
        with self._guard:
            self._status = self._status | {"state": state, "attempt": self.attempt} | facts
            self._write_status(durable=True)

    def close(self) -> None:
        """Release the lock."""
        self._closing.set()
        with self._guard:
            if self._lock is None:
                return
            try:
                self.storage.remove(self.file("owner.json"))
                Path(self.storage.local(self.file("run.lock"))).unlink(missing_ok=True)
            finally:
                os.close(self._lock)
                self._lock = None

    def _refuse_strangers(self) -> None:
        """Refuse a folder that holds no run, but files that a run would overwrite."""
        strangers = [name for name in OWN_FILES if self.storage.exists(self.file(name))]
        if strangers and not self.holds_run():
            raise ConfigError(
                f"RUN.dir = {self.path!r} holds no run, but {', '.join(strangers)}, which a run would overwrite; set "
                "RUN.dir to another folder, or move them away"
            )

    def _probe(self) -> None:
        probe = self.file(f"probe.tmp-{uuid.uuid4().hex[:8]}")
        try:
            self.storage.make_folder(self.path)
            self.storage.create(probe, b"\0" * 4096)
            self.storage.remove(probe)
        except OSError as error:
            with suppress(OSError):  # there is no probe where the path leads through a file
                Path(self.storage.local(probe)).unlink()
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"RUN.dir = {self.path!r} cannot be written: {error.strerror or error} (errno {error.errno}); "
            "set RUN.dir to a folder that this user may write to, on a disk with space left"
        )

    def _sweep(self) -> None:
        """Delete the files that a killed attempt was about to put in place of others."""
        for name in self.storage.names(self.path):
            if TEMPORARY.search(name):
                self.storage.remove(self.file(name))

    def _take(self, owner: Owner) -> None:
        # A POSIX record lock belongs to the process: workers forked from it do not hold it, and the kernel drops
        # it when the process dies. It says nothing to other hosts without a shared lock manager; the record does.
        before = self._owner()
        if before is not None and before.host == owner.host and before.blocks(owner):
            raise FolderInUseError(self._in_use(before))
        handle = os.open(self.storage.local(self.file("run.lock")), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino != Path(self.storage.local(self.file("run.lock"))).stat().st_ino:
                raise BlockingIOError  # the former owner removed the file between our open and our lock
            before = self._owner()
            if before is not None and before.blocks(owner):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            os.close(handle)
            raise FolderInUseError(self._in_use(self._owner())) from None
        self._lock = handle
        self.storage.replace_json(self.file("owner.json"), asdict(owner))

    def _owner(self) -> Owner | None:
        record = self.storage.read_json(self.file("owner.json"))
        try:
            return Owner(**(record | {"lease": float(record["lease"])})) if record else None
        except (TypeError, ValueError, KeyError):
            return None

    def _in_use(self, owner: Owner | None) -> str:
        who = f"process {owner.pid} on {owner.host} (attempt {owner.attempt})" if owner else "another process"
        if owner and owner.host != socket.gethostname():
            left = max(0, round(3 * LEASE_SECONDS - (time.time() - owner.lease)))
            who += f" (if that one is dead, this folder can be taken over in {left} s)"
        return (
            f"RUN.dir = {self.path!r} is in use by {who}; wait for it to end, stop it, or give this run a folder of "
            "its own with RUN.dir=..."
        )

    def _renew(self) -> None:
        while not self._closing.wait(LEASE_SECONDS):
            with self._guard:
                if self._lock is None:
                    return
                try:
                    self.storage.replace_json(self.file("owner.json"), asdict(Owner.here(self.attempt)), durable=False)
                    self._write_status(durable=False)
                except OSError:
                    continue  # a full or absent disk fails the next save, which says so; the lease may be renewed later

    def _write_status(self, *, durable: bool) -> None:
        if self._status:
            content = self._status | {
                "heartbeat": {"at": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
            }
            self.storage.replace(self.file("status.json"), (json.dumps(content) + "\n").encode(), durable=durable)


def _count(status: dict[str, Any], key: str) -> int:
    """Return a number out of status.json, 0 where it is not there or was damaged by hand."""
    value = status.get(key)
    return value if isinstance(value, int) else 0


def _process_start(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
