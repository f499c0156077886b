"""The lock of a run folder: an owner record, and a kernel lock or claims in an object store."""

import errno
import fcntl
import logging
import os
import random
import re
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from phasetrain.errors import FolderInUseError
from phasetrain.runtime.storage import Storage

log = logging.getLogger(__name__)

LOCK_FILES = ("owner.json", "run.lock")
"""Files of the lock, which its owner removes when it releases the lock."""

LEASE_SECONDS = 30.0
"""Interval at which the owner of a run folder renews its lease and its heartbeat."""

EXPIRED_SECONDS = 3 * LEASE_SECONDS
"""Age from which on a lease has expired: two renewals in a row were missed."""


WATCHED_SECONDS = 2 * LEASE_SECONDS
"""How long an owner on another host is watched for a renewal before its folder is taken over."""

MAX_SKEW_SECONDS = 3600.0
"""Largest difference of the clocks of two hosts: an older lease has expired on any clock."""

CLAIM = re.compile(r"claim\.tmp-[0-9a-f]{8}")
"""Names of claims to a run folder in an object store."""

CLAIMS = 10
"""How often a process claims a folder that others claim at the same moment."""

CLAIM_SECONDS = 0.5
"""Mean time between two claims."""

POLL_SECONDS = 1.0
"""Interval at which a watched record is read."""

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre mounted without `flock`."""


def is_lease_expired(renewed_at: float, now: float) -> bool:
    """Return whether an owner that renewed its lease at this time counts as dead.

    The only rule for that: the lock, `runs list`, reports and sweeps use it.
    """
    return now - renewed_at > EXPIRED_SECONDS


@dataclass(frozen=True)
class Owner:
    """The process that may write to a run folder.

    Attributes:
        host, pid: machine and process.
        started: start time of the process in clock ticks since boot, to distinguish processes that
            got the same pid one after the other; None if unknown.
        job: job id of the cluster's scheduler, or None.
        attempt: number of the attempt.
        lease: time of the last renewal, in seconds since 1970.
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

    def blocks(self, other: "Owner") -> bool:
        """Return whether this owner keeps `other` from taking the folder over."""
        if self.host == other.host:
            # pid and start time: the kernel gives the pid of a dead owner to other processes
            if (self.pid, self.started) == (other.pid, other.started):
                return True
            # Whoever holds the kernel lock: a process loses it as soon as anything in it, such as
            # a hook that copies the folder, closes another handle of the file.
            return self.started is not None and process_start(self.pid) == self.started
        # The scheduler has ended the former attempt of a job before it starts the next one.
        if self.job is not None and self.job == other.job and other.attempt > self.attempt:
            return False
        return not is_lease_expired(self.lease, other.lease)

    def may_be_misjudged(self, other: "Owner") -> bool:
        """Return whether the clocks of two hosts decide if this owner keeps `other` out: its lease
        has expired not long ago, or is from the future."""
        if self.host == other.host or (self.job is not None and self.job == other.job):
            return False
        age = other.lease - self.lease
        return age < -EXPIRED_SECONDS or EXPIRED_SECONDS < age < MAX_SKEW_SECONDS


class FolderLock:
    """The lock of a run folder.

    The record `owner.json` names the owner. On a local file system there is a POSIX record lock as
    well, for processes that start at the same moment. It belongs to the process: forked workers do
    not hold it, and the kernel releases it when the process dies. Other hosts need not see it.
    In an object store, processes that start at the same moment are told apart by claims, which
    needs listings that show every object that was written.

    Args:
        path: the run folder.
        storage: access to its files.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path = path
        self.storage = storage
        self._handle: int | None = None
        self._held = False
        self._dead: Owner | None = None

    def take(self, owner: Owner) -> None:
        """Take the lock.

        Raises:
            FolderInUseError: another process has it.
        """
        before = self._read_owner()
        # A second lock of this process must be rejected before the file is opened: POSIX drops all
        # locks that a process has on a file as soon as it closes any handle of that file.
        if before is not None and before.host == owner.host and before.blocks(owner):
            raise FolderInUseError(self._describe_owner(before))
        if before is not None and before.may_be_misjudged(owner):
            self._watch(before)
        claim = ""
        if self.storage.keeps_files:
            self._handle = self._acquire_kernel_lock(owner)
        else:
            claim = self._claim_alone(owner)
            # Again: whoever has withdrawn its claim meanwhile has written the record before.
            before = self._read_owner()
        if self._handle is None and self._is_blocked(before, owner):
            self._remove_claim(claim)
            raise FolderInUseError(self._describe_owner(before))
        self._held = True
        self._write_owner(owner, durable=True)
        self._remove_claim(claim)
        # Read back: hosts that do not share the kernel lock may write at the same moment, and the
        # last writer is the owner.
        if (now := self._read_owner()) != owner:
            self._held = False
            self._close_handle()
            raise FolderInUseError(self._describe_owner(now))

    def renew(self, owner: Owner) -> None:
        """Write the record again, with a new lease.

        Raises:
            FolderInUseError: another process has taken the folder over, because the lease had
                expired.
        """
        now = self._read_owner()
        if now is not None and (now.host, now.pid, now.started) != (
            owner.host,
            owner.pid,
            owner.started,
        ):
            self._held = False
            raise FolderInUseError(self._describe_owner(now))
        # No fsync: a renewal that a crash loses only makes the lease of a dead owner expire sooner.
        self._write_owner(owner, durable=False)

    def release(self) -> None:
        """Release the lock; do nothing if it is not held, or another process has taken it."""
        try:
            if self._held:
                # The record first: a lock file left by a kill in between blocks nobody.
                self.storage.remove(self._record)
                if self._handle is not None:
                    Path(self._file).unlink(missing_ok=True)
        finally:
            self._held = False
            self._close_handle()

    def release_at(self, path: str) -> None:
        """Release the lock after the folder was renamed to `path`."""
        here = self.path
        # At the former path another process may have a folder and a lock of its own by now.
        self.path = path
        try:
            self.release()
        finally:
            self.path = here

    def has_files(self) -> bool:
        """Return whether the lock is held, or its owner was killed."""
        return any(self.storage.exists(f"{self.path}/{name}") for name in LOCK_FILES)

    @property
    def _record(self) -> str:
        return f"{self.path}/owner.json"

    @property
    def _file(self) -> str:
        return self.storage.local_path(f"{self.path}/run.lock")

    def _write_owner(self, owner: Owner, *, durable: bool) -> None:
        self.storage.replace_json(self._record, asdict(owner), durable=durable)

    def _close_handle(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _acquire_kernel_lock(self, owner: Owner) -> int | None:
        """Lock the file and return its handle; None if the file system has no locks."""
        # O_CLOEXEC: a program that the run starts must not inherit the handle.
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # lockf and not flock: a flock is shared with forked workers, which may outlive the run
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino != Path(self._file).stat().st_ino:
                # the former owner removed the file between our open and our lock
                raise BlockingIOError
            # The kernel lock says nothing about owners on other hosts: their lease does.
            if self._is_blocked(self._read_owner(), owner):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            os.close(handle)
            raise FolderInUseError(self._describe_owner(self._read_owner())) from None
        except OSError as error:
            # Without a lock, the file that was created above is of no use.
            os.close(handle)
            Path(self._file).unlink(missing_ok=True)
            if error.errno not in NO_LOCKS:
                raise
            log.info(
                "RUN.dir = %r: the file system has no locks (%s); owner.json alone keeps other "
                "processes out",
                self.path,
                error.strerror,
            )
            return None
        return handle

    def _claim_alone(self, owner: Owner) -> str:
        """Write a claim into an object store, and return its path once no other process has one.

        A store has no locks, and processes that start at the same moment all find no owner. Each
        writes a claim and then lists the claims: of two, at least the second sees the other. It
        withdraws and tries again, until the first has written the record.

        Raises:
            FolderInUseError: other processes have kept claiming the folder.
        """
        for _ in range(CLAIMS):
            # The suffix of temporary files: `RunFolder.open` removes what a kill leaves.
            name = f"claim.tmp-{uuid.uuid4().hex[:8]}"
            claim = f"{self.path}/{name}"
            self.storage.replace_json(claim, asdict(owner))
            others = [other for other in self._read_claims(name) if other.blocks(owner)]
            if not others:
                return claim
            self._remove_claim(claim)
            # Not from the global generators: a wait must not change what a run draws.
            time.sleep(CLAIM_SECONDS * random.Random().uniform(0.5, 1.5))
            self._check_owner(owner)
        raise FolderInUseError(self._describe_owner(others[0]))

    def _check_owner(self, owner: Owner) -> None:
        now = self._read_owner()
        if self._is_blocked(now, owner):
            raise FolderInUseError(self._describe_owner(now))

    def _read_claims(self, own: str) -> list[Owner]:
        names = self.storage.list_names(self.path)
        others = [name for name in names if CLAIM.fullmatch(name) and name != own]
        claims = (self._read_record(f"{self.path}/{name}") for name in others)
        return [claim for claim in claims if claim is not None]

    def _remove_claim(self, claim: str) -> None:
        if claim:
            self.storage.remove(claim)

    def _is_blocked(self, before: Owner | None, owner: Owner) -> bool:
        return before is not None and before != self._dead and before.blocks(owner)

    def _watch(self, before: Owner) -> None:
        """Wait until the record of an owner on another host has not changed for two renewals.

        Its clock may differ from the one here, so that its lease says nothing; a renewal does.

        Raises:
            FolderInUseError: the owner is alive.
        """
        log.info(
            "RUN.dir = %r: process %d on %s may still run it; watching for %g s whether it renews "
            "its lease",
            self.path,
            before.pid,
            before.host,
            WATCHED_SECONDS,
        )
        ends = time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < ends:
            time.sleep(POLL_SECONDS)
            now = self._read_owner()
            if now is None:
                return
            if now != before:
                raise FolderInUseError(self._describe_owner(now))
        self._dead = before

    def _read_owner(self) -> Owner | None:
        return self._read_record(self._record)

    def _read_record(self, path: str) -> Owner | None:
        record = self.storage.read_json(path)
        try:
            if record:
                return Owner(**(record | {"lease": float(record["lease"])}))
            return None
        except (TypeError, ValueError, KeyError):
            # A torn record blocks nobody; else a kill would lock the folder for ever.
            return None

    def _describe_owner(self, owner: Owner | None) -> str:
        if owner:
            who = f"process {owner.pid} on {owner.host} (attempt {owner.attempt})"
        else:
            who = "another process"
        if owner and owner.host != socket.gethostname():
            left = round(EXPIRED_SECONDS - (time.time() - owner.lease))
            left = min(max(0, left), round(EXPIRED_SECONDS))  # the clocks may differ
            who += f" (if that one is dead, this folder can be taken over in {left} s)"
        return (
            f"RUN.dir = {self.path!r} is in use by {who}; wait for it to end, stop it, or choose "
            "another folder with RUN.dir=..."
        )


def find_owner(path: str, storage: Storage) -> Owner | None:
    """Return the owner of a run folder if it is a living process of this machine."""
    owner = FolderLock(path, storage)._read_owner()
    if owner is None or owner.host != socket.gethostname() or owner.started is None:
        return None
    if process_start(owner.pid) == owner.started:
        return owner
    return None


def process_start(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it is gone or unknown."""
    try:
        # Fields are counted after the last parenthesis: the name of the program, in parentheses,
        # may hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie has ended, and its parent may never ask for its exit code.
        if fields[0] in "ZX":
            return None
        return int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def process_age() -> float:
    """Return the seconds since this process started; 0 if unknown."""
    started = process_start(os.getpid())
    if started is None:
        return 0.0
    # CLOCK_BOOTTIME, like the start time in /proc, includes the time that the machine was suspended
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
