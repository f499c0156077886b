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
from dataclasses import asdict
from pathlib import Path

from phasetrain.errors import FolderInUseError
from phasetrain.runs.owner import EXPIRED_SECONDS, LEASE_SECONDS, OWNER, Owner, read_owner
from phasetrain.runtime.storage import Storage

log = logging.getLogger(__name__)

LOCK = "run.lock"
LOCK_FILES = (OWNER, LOCK)
"""Files of the lock, which its owner removes when it releases the lock."""

WATCHED_SECONDS = 2 * LEASE_SECONDS
"""How long an owner on another host is watched for a renewal before its folder is taken over."""

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


class KernelLock:
    """A POSIX record lock on a file in a run folder.

    It belongs to the process: forked workers do not hold it, and the kernel releases it when the
    process dies. Other hosts need not see it.

    Args:
        path: the run folder.
        storage: access to its files, which are on a file system.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self._path = path
        self._storage = storage
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock; do nothing if the file system has no locks.

        Raises:
            BlockingIOError: another process has it.
        """
        file = self._storage.local_path(f"{self._path}/{LOCK}")
        # O_CLOEXEC: a program that the run starts must not inherit the handle.
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # lockf and not flock: a flock is shared with forked workers, which may outlive the run
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same_file = os.fstat(handle).st_ino == Path(file).stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            os.close(handle)
            raise BlockingIOError from None
        except OSError as error:
            # Without a lock, the file that was created above is of no use.
            os.close(handle)
            Path(file).unlink(missing_ok=True)
            if error.errno not in NO_LOCKS:
                raise
            log.info(
                "RUN.dir = %r: the file system has no locks (%s); owner.json alone keeps other "
                "processes out",
                self._path,
                error.strerror,
            )
            return
        if not is_same_file:
            # the former owner removed the file between our open and our lock
            os.close(handle)
            raise BlockingIOError
        self._handle = handle

    def remove_file(self, path: str) -> None:
        """Remove the file from the run folder, which is at `path` now, if the lock is held."""
        if self._handle is not None:
            Path(self._storage.local_path(f"{path}/{LOCK}")).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None


class Claims:
    """Claims to a run folder in an object store, which has no locks.

    Processes that start at the same moment all find no owner. Each writes a claim and then lists
    the claims: of two, at least the second sees the other. This needs a store that lists every
    object as soon as it was written.

    Args:
        path: the run folder.
        storage: access to its files.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self._path = path
        self._storage = storage

    def write(self, owner: Owner) -> str:
        """Write a claim of a process, and return its path."""
        # The suffix of temporary files: `RunFolder.open` removes what a kill leaves.
        claim = f"{self._path}/claim.tmp-{uuid.uuid4().hex[:8]}"
        self._storage.replace_json(claim, asdict(owner))
        return claim

    def list_others(self, claim: str) -> list[Owner]:
        """Return the processes with other claims."""
        own = claim.rpartition("/")[2]
        names = self._storage.list_names(self._path)
        others = [name for name in names if CLAIM.fullmatch(name) and name != own]
        claims = (read_owner(f"{self._path}/{name}", self._storage) for name in others)
        return [claim for claim in claims if claim is not None]

    def withdraw(self, claim: str) -> None:
        """Remove a claim; an empty path means none."""
        if claim:
            self._storage.remove(claim)


class FolderLock:
    """The lock of a run folder.

    The record `owner.json` names the owner. Processes that start at the same moment are told apart
    by a kernel lock as well, or by claims in an object store.

    Args:
        path: the run folder.
        storage: access to its files.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path = path
        self.storage = storage
        self._record = f"{path}/{OWNER}"
        self._kernel_lock = KernelLock(path, storage)
        self._claims = Claims(path, storage)
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
            try:
                self._kernel_lock.acquire()
            except BlockingIOError:
                raise FolderInUseError(self._describe_owner(self._read_owner())) from None
        else:
            claim = self._claim_alone(owner)
        # Again: a process that has released its lock or withdrawn its claim meanwhile may have
        # written the record before, and the kernel lock says nothing about owners on other hosts.
        try:
            before = self._read_owner()
        except OSError:
            # No owner is known, so the file that was just created is of no use.
            self._kernel_lock.remove_file(self.path)
            self._kernel_lock.close()
            raise
        if self._is_blocked(before, owner):
            self._kernel_lock.close()
            self._claims.withdraw(claim)
            raise FolderInUseError(self._describe_owner(before))
        self._held = True
        self.storage.replace_json(self._record, asdict(owner))
        self._claims.withdraw(claim)
        # Read back: hosts that do not share the kernel lock may write at the same moment, and the
        # last writer is the owner.
        if (now := self._read_owner()) != owner:
            self._held = False
            self._kernel_lock.close()
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
        self.storage.replace_json(self._record, asdict(owner), durable=False)

    def release(self) -> None:
        """Release the lock; do nothing if it is not held, or another process has taken it."""
        self._release(self.path)

    def release_at(self, path: str) -> None:
        """Release the lock after the folder was renamed to `path`."""
        # At the former path another process may have a folder and a lock of its own by now.
        self._release(path)

    def has_files(self) -> bool:
        """Return whether the lock is held, or its owner was killed."""
        return any(self.storage.exists(f"{self.path}/{name}") for name in LOCK_FILES)

    def _release(self, path: str) -> None:
        try:
            if self._held:
                # The record first: a lock file left by a kill in between blocks nobody.
                self.storage.remove(f"{path}/{OWNER}")
                self._kernel_lock.remove_file(path)
        finally:
            self._held = False
            self._kernel_lock.close()

    def _claim_alone(self, owner: Owner) -> str:
        """Write a claim, and return its path once no other process has one.

        A process that sees another claim withdraws its own and tries again, until the first one has
        written the record.

        Raises:
            FolderInUseError: another process has the folder, or others have kept claiming it.
        """
        for _ in range(CLAIMS):
            claim = self._claims.write(owner)
            others = [other for other in self._claims.list_others(claim) if other.blocks(owner)]
            if not others:
                return claim
            self._claims.withdraw(claim)
            # Not from the global generators: a wait must not change what a run draws.
            time.sleep(CLAIM_SECONDS * random.Random().uniform(0.5, 1.5))
            now = self._read_owner()
            if self._is_blocked(now, owner):
                raise FolderInUseError(self._describe_owner(now))
        raise FolderInUseError(self._describe_owner(others[0]))

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
        return read_owner(self._record, self.storage)

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
