"""The owner of a run folder: the process that may write to it, and whether it is alive."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from phasetrain.runtime.storage import Storage

OWNER = "owner.json"
"""Name of the record of the owner in a run folder."""

LEASE_SECONDS = 30.0
"""Interval at which the owner of a run folder renews its lease and its heartbeat."""

EXPIRED_SECONDS = 3 * LEASE_SECONDS
"""Age from which on a lease has expired: two renewals in a row were missed."""

MAX_SKEW_SECONDS = 3600.0
"""Largest difference of the clocks of two hosts: an older lease has expired on any clock."""


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


def read_owner(path: str, storage: Storage) -> Owner | None:
    """Return the process that a record of an owner names; None without a readable record."""
    record = storage.read_json(path)
    try:
        if record:
            return Owner(**(record | {"lease": float(record["lease"])}))
        return None
    except (TypeError, ValueError, KeyError):
        # A torn record blocks nobody; else a kill would lock the folder for ever.
        return None


def find_owner(path: str, storage: Storage) -> Owner | None:
    """Return the owner of a run folder if it is a living process of this machine."""
    owner = read_owner(f"{path}/{OWNER}", storage)
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
