"""The run folder: its lock, its status, its logs, and the room on its disk (section RUN)."""

import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.runs.lock import FolderLock
from phasetrain.runs.owner import EXPIRED_SECONDS, LEASE_SECONDS, Owner
from phasetrain.runs.records import ATTEMPTS, PLAN, STATUS, StatusRecord
from phasetrain.runtime.storage import TEMPORARY, LogFile, Storage, open_run_storage
from phasetrain.runtime.storage.urls import redact_url, scheme_of

log = logging.getLogger(__name__)

RUN_FILES = (
    "breakdown.json",
    "RUN.md",
    "attempts.jsonl",
    "config.yaml",
    "overrides.yaml",
    "environment.json",
    "git.diff",
    "memory.json",
    "metrics.jsonl",
    "predictions.json",
    "report.html",
    "reproduce.sh",
    "steps.ledger",
)
"""Files that a run overwrites or appends to."""

LASTING_FACTS = (
    "updates",
    "reached",
    "checkpoint",
    "time",
    "idle_attempts",
    "started_from",
    "cause",
    "tried",
    "restart",
)
"""Entries of status.json that an attempt keeps from the one before until it sets them."""

ATTEMPT_FACTS = (
    *("attempt", "state", "reason", "exit_code", "updates", "reached", "heartbeat"),
    "resumed_at",
)
"""Entries of status.json that are kept in attempts.jsonl, in addition to the times."""

SPARE_BYTES = 1 << 20
"""Free bytes below which optional files are not written."""


class StatusFile:
    """Writes status.json, from two threads: the run, and the one that renews the heartbeat.

    Args:
        path: path of the file.
        storage: access to it.

    Attributes:
        attempt: number of the attempt.
        collect: returns further entries whenever the file is written.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path = path
        self.storage = storage
        self.attempt = 1
        self.collect: Callable[[], Mapping[str, Any]] = dict
        self._facts: dict[str, Any] = {}

    def begin(self, before: StatusRecord) -> None:
        """Start a new attempt after the one that the record is of."""
        self.attempt = before.attempt + 1
        self._facts = {key: before.content[key] for key in LASTING_FACTS if key in before.content}

    def forget(self) -> None:
        """Write nothing until a new attempt has a state."""
        self._facts = {}

    def update(self, **facts: Any) -> None:
        """Set entries, which are kept until they are set again."""
        self._facts = {**self._facts, "attempt": self.attempt, **facts}

    def write(self, *, durable: bool) -> None:
        """Write the file with a new heartbeat.

        Before this attempt has a state, the file keeps the one of the attempt before.
        """
        # A heartbeat during the start of an attempt must not erase the end of the former attempt.
        if "state" not in self._facts:
            return
        self._facts = {**self._facts, **self.collect()}
        heartbeat = {"at": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        content = {**self._facts, "heartbeat": heartbeat}
        self.storage.replace_json(self.path, content, durable=durable)


class DiskSpace:
    """Free space of the disk that a run folder is on.

    Args:
        path: the run folder, which need not exist.
        storage: access to its files.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path = path
        self.storage = storage

    def free_bytes(self) -> int | None:
        """Return the free bytes; None if the storage does not tell."""
        for folder in (self.path, *map(str, Path(self.path).parents)):
            free = self.storage.free_bytes(folder)
            if free is not None:  # None as well where a folder does not exist yet
                return free
        return None

    def has_spare(self) -> bool:
        """Return whether optional files may be written; the last bytes are left for checkpoints and
        the status."""
        free = self.free_bytes()
        return free is None or free >= SPARE_BYTES

    def require(self, needed: int, wanted: int) -> None:
        """Check that the disk has room for the checkpoints of the run.

        Args:
            needed: bytes without which no checkpoint can be saved: an error.
            wanted: bytes of all checkpoints that are kept: a warning.

        Raises:
            ConfigError: there is too little room (code `folder.no_space`).
        """
        free = self.free_bytes()
        # unknown on object stores, which do not fill up
        if free is None or free >= wanted:
            return
        sentence = (
            f"RUN.dir = {self.path!r}: {free:,} bytes are free and the checkpoints of this run "
            f"need about {wanted:,}; free space, lower CHECKPOINT.keep_last, or set RUN.dir to "
            "another disk"
        )
        if free < needed:
            raise ConfigError(sentence, code="folder.no_space")
        log.warning(sentence)


class StatusBackup:
    """The status and the history of attempts before an attempt, which may turn out to be refused.

    Args:
        folder: the run folder, with its lock held.
    """

    def __init__(self, folder: "RunFolder") -> None:
        self._folder = folder
        self._contents: dict[str, bytes | None] = {}
        for name in (STATUS, ATTEMPTS):
            self._contents[name] = None
            with suppress(FileNotFoundError):
                self._contents[name] = folder.storage.read(folder.file(name))

    def restore(self) -> None:
        """Put the files back, and leave nothing in a folder that had no run."""
        folder = self._folder
        # A full disk leaves the record of an attempt that was refused, and nothing worse.
        with suppress(OSError):
            for name, content in self._contents.items():
                if content is not None:
                    folder.storage.replace(folder.file(name), content)
                else:
                    folder.storage.remove(folder.file(name))
            if self._contents[STATUS] is None and not folder.has_run():
                # Without a run they would be foreign files for the next attempt.
                for name in (*RUN_FILES, PLAN):
                    folder.storage.remove(folder.file(name))


class RunFolder:
    """A run folder under the lock of this process; of several ranks only rank 0 opens it.

    Args:
        path: the folder; created if it does not exist.
        storage: access to its files; chosen by the path by default.
        rank: rank of this process; all but rank 0 leave the status alone.

    Attributes:
        space: free space of its disk.
        status_file: writer of status.json.
        before_close: callbacks called at the end in reverse order, while the lock is still held.
        root: the same folder; an absolute path if it is local, so that a part of the run may change
            the working directory.
        lost: why nothing may be written any more: another process has taken the folder over while
            this one was stopped for longer than its lease, or the folder was moved or deleted;
            else empty.
        lost_code: code of that error.
    """

    def __init__(self, path: str, storage: Storage | None = None, *, rank: int = 0) -> None:
        self.rank = rank
        self.path = path.rstrip("/")
        self.storage = storage or open_run_storage(path)
        self.root = self.path
        if self.storage.keeps_files:
            self.root = str(Path(self.storage.local_path(self.path)).absolute())
        self.space = DiskSpace(self.root, self.storage)
        self.before_close: list[Callable[[], None]] = []
        self.lost = ""
        self.lost_code = FolderInUseError.default_code
        self.status_file = StatusFile(self.file(STATUS), self.storage)
        self._lock = FolderLock(self.root, self.storage)
        self._is_open = False
        self._closing = threading.Event()
        # Held while status.json or the lock is written: the thread of the lease writes both as
        # well.
        self._guard = threading.Lock()
        self._logs: list[LogFile] = []
        self._backup: StatusBackup | None = None
        self._is_withdrawn = False

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1."""
        return self.status_file.attempt

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.root}/{name}"

    def check_place(self) -> None:
        """Set `lost` if the folder of this attempt is not at its path any more."""
        if not self._is_open or not self.storage.keeps_files or self.lost:
            return
        # Both are there from the start. By name and not by inode, which some network drives change.
        if not any(self.storage.exists(self.file(name)) for name in (STATUS, "owner.json")):
            self.lost_code = "folder.moved"
            self.lost = (
                f"RUN.dir = {self.path!r}: the folder was moved or deleted during the run; move "
                "it back, or run the same command with RUN.dir set to its new path, to resume from "
                "its newest checkpoint"
            )

    def has_run(self) -> bool:
        """Return whether a run has written here."""
        return self.storage.exists(self.file(STATUS)) or bool(
            self.storage.list_names(self.file("checkpoints"))
        )

    def has_lock(self) -> bool:
        """Return whether a process holds the lock, or was killed while it held it."""
        return self._lock.has_files()

    def read_status(self) -> StatusRecord:
        """Return the record of status.json; an empty one if there is none.

        Raises:
            OSError: the file system failed. A file that cannot be read must not count as absent:
                the run would begin with attempt 1.
        """
        return StatusRecord.from_json(self.storage.read_json(self.file(STATUS)))

    def open(self) -> None:
        """Create the folder, check that it can be written, and take its lock.

        Raises:
            ConfigError: the folder cannot be created or written (code `folder.not_writable`), or it
                holds foreign files (code `folder.foreign_files`).
            FolderInUseError: another process owns it.
        """
        _reject_foreign_files(self)
        with self.writing():
            if Path(self.path).is_symlink():
                # The folder behind a link was set aside, or its disk was replaced.
                self.storage.make_folder(str(Path(self.path).resolve()))
        _check_writable(self.path, self.storage)
        try:
            before = self.read_status()
            self.status_file.begin(before)
            self._lock.take(Owner.here(self.attempt))
            self._backup = StatusBackup(self)
            remove_temporary(self.root, self.storage)
            if before.attempt and self.space.has_spare():
                _archive_attempt(self.file(ATTEMPTS), self.storage, before)
        except OSError as error:
            self.close()
            raise _not_writable(self.path, error) from error
        # A daemon: a run that ends without `close` must not wait for the next renewal.
        threading.Thread(target=self._renew_lease, name="phasetrain-lease", daemon=True).start()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError into a ConfigError about RUN.dir."""
        try:
            yield
        except OSError as error:
            raise _not_writable(self.path, error) from error

    def log(self, name: str) -> LogFile:
        """Open a file for appending; it is made durable before each checkpoint is."""
        with self.writing():
            opened = self.storage.log_file(self.file(name))
        self._logs.append(opened)
        return opened

    def sync_logs(self) -> None:
        """Make all logs durable.

        Raises:
            OSError: the file system failed.
        """
        for opened in self._logs:
            opened.sync()

    def write_status(self, state: str, **facts: Any) -> None:
        """Write status.json durably: the state and `facts`, which are kept until they are set
        again.

        Raises:
            OSError: the file system failed.
        """
        with self._guard:
            self.status_file.update(state=state, **facts)
            self._write_status(durable=True)
            # From now on the folder has a status, so that a missing one means that the folder was
            # moved.
            self._is_open = self.rank == 0

    def note(self, **facts: Any) -> None:
        """Add `facts` to status.json now, or with the next heartbeat if the file system fails."""
        with self._guard:
            self.status_file.update(**facts)
            with suppress(OSError):
                self._write_status(durable=False)

    def withdraw(self) -> None:
        """Let `close` leave the folder as it was before this attempt, except for the logs."""
        with self._guard:
            self.status_file.forget()
            self._is_withdrawn = True

    def close(self) -> None:
        """Call `before_close`, close the logs, and release the lock."""
        # The lock is held until all files are complete: a process that waits for it reads them.
        while self.before_close:
            # popped before the call: a callback that raises is not called again by a second close
            call = self.before_close.pop()
            if not self.lost:
                call()
        # Set outside the guard, so that a renewal that waits for the guard sees it.
        self._closing.set()
        with self._guard:
            while self._logs:
                self._logs.pop().close()
            # None on all ranks but rank 0, and before the lock was taken.
            if self._is_withdrawn and self._backup is not None and not self.lost:
                self._backup.restore()
            try:
                self._lock.release()
            except OSError as error:
                log.warning(
                    "the lock could not be released (%s); it ends with this process on this "
                    "machine",
                    error,
                )

    def _renew_lease(self) -> None:
        while not self._closing.wait(LEASE_SECONDS):
            with self._guard:
                # `close` may have released the lock while this thread waited for the guard.
                if self._closing.is_set():
                    return
                self.check_place()
                if self.lost:
                    return
                try:
                    self._lock.renew(Owner.here(self.attempt))
                    self._write_status(durable=False)
                except FolderInUseError as error:
                    # Raising here would end this thread only: the run looks at `lost`.
                    self.lost = str(error)
                    return
                except OSError:  # a full or absent disk fails the next save, which reports it
                    continue

    def _write_status(self, *, durable: bool) -> None:
        self.check_place()  # the file must not be the only one in a new folder
        if self.rank == 0 and not self.lost:
            self.status_file.write(durable=durable)


def describe_store(folder: RunFolder) -> None:
    """Log the guarantees for a run in an object store; nothing for a run on this machine."""
    if folder.storage.keeps_files:
        return
    url = redact_url(folder.path)
    if scheme_of(folder.path) == "memory":
        log.warning(
            "RUN.dir = %r: the run is in the memory of this process, and is gone when it ends; "
            "no other process can resume or read it",
            url,
        )
    log.info(
        "RUN.dir = %r is in an object store: files change as a whole, logs with each "
        "checkpoint; the lock is the object owner.json, which an owner on another host loses "
        "%g s after its last renewal, and it holds if the store lists each object as soon as "
        "it is written, as S3 does",
        url,
        EXPIRED_SECONDS,
    )


def remove_temporary(path: str, storage: Storage) -> None:
    """Remove files of a run folder that a killed attempt was about to rename.

    Under the lock only: an owner that is alive still needs its temporary files.
    """
    for name in storage.list_names(path):
        if TEMPORARY.search(name):
            storage.remove(f"{path}/{name}")


def _reject_foreign_files(folder: RunFolder) -> None:
    """Raise ConfigError for a folder without a run that has files which a run overwrites."""
    foreign = [name for name in RUN_FILES if folder.storage.exists(folder.file(name))]
    if foreign and not folder.has_run():
        raise ConfigError(
            f"RUN.dir = {folder.path!r} contains no run, but files that a run would overwrite: "
            f"{', '.join(foreign)}; set RUN.dir to another folder, or move these files",
            code="folder.foreign_files",
        )


def _check_writable(path: str, storage: Storage) -> None:
    # The name has the form of TEMPORARY: the next attempt removes a probe that a kill has left.
    probe = f"{path}/probe.tmp-{uuid.uuid4().hex[:8]}"
    try:
        # A real write, because permission bits say nothing on network drives and full disks.
        storage.make_folder(path)
        storage.create(probe, b"\0" * 4096)  # a full disk still creates empty files
        storage.remove(probe)
    except OSError as error:
        with suppress(OSError):
            storage.remove(probe)
        raise _not_writable(path, error) from error


def _archive_attempt(path: str, storage: Storage, before: StatusRecord) -> None:
    """Append the status of the attempt before to attempts.jsonl; a full disk loses the line."""
    facts = {key: before.content[key] for key in ATTEMPT_FACTS if key in before.content}
    facts["time"] = {"attempt": before.attempt_seconds}
    # The history of attempts is optional: without it the run still resumes.
    with suppress(OSError):
        file = storage.log_file(path)
        file.write((json.dumps(facts) + "\n").encode())
        file.flush()
        file.close()


def _not_writable(path: str, error: OSError) -> ConfigError:
    advice = "set RUN.dir to a folder on a disk, such as runs/mine, that this user may write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free space on its disk, or set RUN.dir to a folder on another one"
    return ConfigError(
        f"RUN.dir = {path!r} cannot be written: {error.strerror or error} (errno {error.errno}); "
        f"{advice}",
        code="folder.not_writable",
    )
