"""Who may write to a run folder: a lock of this host's kernel, and a record that other hosts can
read."""

import fcntl
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from phasetrain.errors import FolderInUseError
from phasetrain.runtime.storage import Storage

LEASE_SECONDS = 30.0
"""Interval at which the owner of a run folder renews its lease and its heartbeat."""

EXPIRED_SECONDS = 3 * LEASE_SECONDS
"""Age from which on a lease has expired: two renewals in a row were missed."""


def is_lease_expired(renewed_at: float, now: float) -> bool:
    """Return whether an owner that renewed its lease at this time counts as dead.

    The only rule for that: the lock, `runs list`, reports and sweeps use it.
    """
    return now - renewed_at > EXPIRED_SECONDS


@dataclass(frozen=True)
class Owner:
    """Who writes to a run folder.

    Attributes:
        host, pid: machine and process.
        started: start time of the process in clock ticks since boot, which tells apart two
            processes that got the same pid; None where the system does not say.
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
        return cls(
            socket.gethostname(), os.getpid(), process_start(os.getpid()), job, attempt, time.time()
        )

    def blocks(self, other: "Owner", *, locked: bool = True) -> bool:
        """Tell whether `other` must not take the folder over.

        Args:
            locked: `other` holds the kernel's lock of this host, so that no other process of it is
                alive here.
        """
        if self.host == other.host:
            if (self.pid, self.started) == (other.pid, other.started):
                return True
            return (
                not locked and self.started is not None and process_start(self.pid) == self.started
            )
        if self.job is not None and self.job == other.job and other.attempt > self.attempt:
            return False
        return not is_lease_expired(self.lease, other.lease)


class FolderLock:
    """The lock of a run folder.

    On a file system of this machine it is a POSIX record lock, which belongs to the process:
    workers forked from it do not hold it, and the kernel drops it when the process dies. It says
    nothing to other hosts without a shared lock manager; the record `owner.json` does, and on an
    object store it is all there is.

    Args:
        path: the run folder.
        storage: the door to it.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path = path
        self.storage = storage
        self._handle: int | None = None
        self._held = False

    def take(self, owner: Owner) -> None:
        """Take the lock.

        Raises:
            FolderInUseError: somebody else has it.
        """
        before = self._owner()
        if before is not None and before.host == owner.host and before.blocks(owner):
            raise FolderInUseError(self._in_use(before))
        if self.storage.keeps_files:
            self._handle = self._locked(owner)
        elif before is not None and before.blocks(owner, locked=False):
            raise FolderInUseError(self._in_use(before))
        self._held = True
        self._write(owner, durable=True)
        if (now := self._owner()) != owner:
            self._held = False
            self._drop()
            raise FolderInUseError(self._in_use(now))

    def renew(self, owner: Owner) -> None:
        """Write the record anew, with the lease of now.

        Raises:
            FolderInUseError: somebody has taken the folder over, because the lease had run out.
        """
        now = self._owner()
        if now is not None and (now.host, now.pid, now.started) != (
            owner.host,
            owner.pid,
            owner.started,
        ):
            self._held = False
            raise FolderInUseError(self._in_use(now))
        self._write(owner, durable=False)

    def release(self) -> None:
        """Give the lock up; nothing happens where it is not held, or where somebody else has it by
        now."""
        try:
            if self._held:
                self.storage.remove(self._record)
                if self._handle is not None:
                    Path(self._file).unlink(missing_ok=True)
        finally:
            self._held = False
            self._drop()

    @property
    def _record(self) -> str:
        return f"{self.path}/owner.json"

    @property
    def _file(self) -> str:
        return self.storage.local_path(f"{self.path}/run.lock")

    def _write(self, owner: Owner, *, durable: bool) -> None:
        self.storage.replace_json(self._record, asdict(owner), durable=durable)

    def _drop(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _locked(self, owner: Owner) -> int:
        """Return the handle of the locked file."""
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino != Path(self._file).stat().st_ino:
                # the former owner removed the file between our open and our lock
                raise BlockingIOError
            before = self._owner()
            if before is not None and before.blocks(owner):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            os.close(handle)
            raise FolderInUseError(self._in_use(self._owner())) from None
        except OSError:
            os.close(handle)
            Path(self._file).unlink(missing_ok=True)
            raise
        return handle

    def _owner(self) -> Owner | None:
        record = self.storage.read_json(self._record)
        try:
            if record:
                return Owner(**(record | {"lease": float(record["lease"])}))
            return None
        except (TypeError, ValueError, KeyError):
            return None

    def _in_use(self, owner: Owner | None) -> str:
        if owner:
            who = f"process {owner.pid} on {owner.host} (attempt {owner.attempt})"
        else:
            who = "another process"
        if owner and owner.host != socket.gethostname():
            left = max(0, round(EXPIRED_SECONDS - (time.time() - owner.lease)))
            who += f" (if that one is dead, this folder can be taken over in {left} s)"
        return (
            f"RUN.dir = {self.path!r} is in use by {who}; wait for it to end, stop it, or give this run a folder of "
            "its own with RUN.dir=..."
        )


def holder(path: str, storage: Storage) -> Owner | None:
    """Return who holds a run folder, if it is a process of this machine that is alive."""
    owner = FolderLock(path, storage)._owner()
    if owner is None or owner.host != socket.gethostname() or owner.started is None:
        return None
    if process_start(owner.pid) == owner.started:
        return owner
    return None


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where it is gone or the system
    does not say."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def process_age() -> float:
    """Return the seconds since this process started; 0 where the system does not say."""
    started = process_start(os.getpid())
    if started is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
