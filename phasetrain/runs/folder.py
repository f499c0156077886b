"""The run folder: everything that a run leaves behind, who owns it, and what its status is (section
RUN)."""

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
from phasetrain.runs.lock import LEASE_SECONDS, FolderLock, Owner
from phasetrain.runtime.storage import TEMPORARY, LogFile, Storage, open_storage

log = logging.getLogger(__name__)

OWN_FILES = (
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
"""Files that a run writes anew or appends to."""


KEPT = ("updates", "reached", "checkpoint", "time", "idle_attempts", "started_from", "cause")
"""What status.json keeps from attempt to attempt until it is set anew."""


SPARE_BYTES = 1 << 20
"""Free bytes from which on files are written that a run can do without."""


OF_AN_ATTEMPT = ("attempt", "state", "reason", "exit_code", "updates", "reached", "heartbeat")
"""What attempts.jsonl keeps of each attempt but the last, beside where its time went."""


class RunFolder:
    """A run folder under the lock of this process, or of the main one of several, which alone opens
    it.

    Args:
        path: the folder; created if need be.
        storage: the door to its files; the one that fits the path by default.
        rank: number of this process; all but 0 leave the status alone.

    Attributes:
        watch: asked for what is to stand in status.json whenever it is written.
        before_close: called, the last one first, when everything else is done and the lock is still
            held.
        lost: who has taken the folder over while this process was stopped for longer than its
            lease, in a sentence; else empty. Nobody may write then.
    """

    def __init__(self, path: str, storage: Storage | None = None, *, rank: int = 0) -> None:
        self.rank = rank
        self.path = path.rstrip("/")
        self.storage = storage or open_storage(path)
        self.attempt = 1
        self.watch: Callable[[], Mapping[str, Any]] = dict
        self.before_close: list[Callable[[], None]] = []
        self.lost = ""
        self._lock = FolderLock(self.path, self.storage)
        self._closing = threading.Event()
        self._guard = threading.Lock()
        self._status: dict[str, Any] = {}
        self._logs: list[LogFile] = []

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.path}/{name}"

    def holds_run(self) -> bool:
        """Tell whether a run has written here."""
        return self.storage.exists(self.file("status.json")) or bool(
            self.storage.list_names(self.file("checkpoints"))
        )

    def status(self) -> dict[str, Any]:
        """Return the content of status.json, empty where there is none."""
        found = self.storage.read_json(self.file("status.json"))
        if isinstance(found, dict):
            return found
        return {}

    def open(self) -> None:
        """Create the folder, see that it can be written, and take its lock.

        Raises:
            ConfigError: the folder cannot be created or written.
            FolderInUseError: another process owns it.
        """
        self._refuse_strangers()
        self._probe()
        try:
            before = self.status()
            self.attempt = count(before, "attempt") + 1
            self._status = {key: before[key] for key in KEPT if key in before}
            self._lock.take(Owner.here(self.attempt))
            self._sweep()
            self._remember(before)
        except OSError as error:
            self.close()
            raise self._not_writable(error) from error
        threading.Thread(target=self._renew, name="phasetrain-lease", daemon=True).start()

    def require(self, needed: int, wanted: int) -> None:
        """See that the disk has room for what the run is going to write.

        Args:
            needed: bytes without which it could not save at all; it is refused.
            wanted: bytes of all checkpoints that it is to keep; a warning.

        Raises:
            ConfigError: there is too little room; both figures are in the message.
        """
        free = self.free()
        if free is None or free >= wanted:
            return
        sentence = (
            f"RUN.dir = {self.path!r}: {free:,} bytes are free and the checkpoints of this run need about "
            f"{wanted:,}; free space, lower CHECKPOINT.keep_last, or set RUN.dir to another disk"
        )
        if free < needed:
            raise ConfigError(sentence)
        log.warning(sentence)

    def has_room(self) -> bool:
        """Tell whether there is room for what a run can do without; the last of it is for
        checkpoints and status."""
        free = self.free()
        return free is None or free >= SPARE_BYTES

    def free(self) -> int | None:
        """Return the bytes that are left where the folder is or will be; None where nobody can
        tell."""
        places = (self.path, *map(str, Path(self.path).parents))
        return next(
            (free for place in places if (free := self.storage.free_bytes(place)) is not None), None
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an error of the file system into a sentence about RUN.dir."""
        try:
            yield
        except OSError as error:
            raise self._not_writable(error) from error

    def log(self, name: str) -> LogFile:
        """Return a file that grows by appending; what was written to it is durable before a
        checkpoint is."""
        with self.writing():
            opened = self.storage.log_file(self.file(name))
        self._logs.append(opened)
        return opened

    def sync_logs(self) -> None:
        """Make all that was written to logs durable.

        Raises:
            OSError: the file system refused.
        """
        for one in self._logs:
            one.sync()

    def write_status(self, state: str, **facts: Any) -> None:
        """Write status.json: the state, the attempt, a heartbeat and `facts`, which are kept until
        set anew.

        Raises:
            OSError: the file system refused.
        """
        with self._guard:
            self._status = self._status | {"state": state, "attempt": self.attempt} | facts
            self._write_status(durable=True)

    def note(self, **facts: Any) -> None:
        """Put `facts` into status.json, now or, where the file system refuses, with the next
        heartbeat."""
        with self._guard:
            self._status = self._status | facts
            with suppress(OSError):
                self._write_status(durable=False)

    def close(self) -> None:
        """Do what was left for the end, close the logs, and release the lock."""
        while self.before_close:
            call = self.before_close.pop()
            if not self.lost:
                call()
        self._closing.set()
        with self._guard:
            while self._logs:
                self._logs.pop().close()
            try:
                self._lock.release()
            except OSError as error:
                log.warning(
                    "the lock could not be taken away (%s); it ends with this process on this machine",
                    error,
                )

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
            with suppress(OSError):
                self.storage.remove(probe)
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"RUN.dir = {self.path!r} cannot be written: {error.strerror or error} (errno {error.errno}); "
            "set RUN.dir to a folder that this user may write to, on a disk with space left"
        )

    def _sweep(self) -> None:
        """Delete the files that a killed attempt was about to put in place of others."""
        for name in self.storage.list_names(self.path):
            if TEMPORARY.search(name):
                self.storage.remove(self.file(name))

    def _remember(self, before: Mapping[str, Any]) -> None:
        """Append what status.json says of the attempt before to attempts.jsonl; a full disk loses
        the line."""
        if "attempt" not in before or not self.has_room():
            return
        time = before.get("time")
        known = {key: before[key] for key in OF_AN_ATTEMPT if key in before}
        known["time"] = {"attempt": time.get("attempt")} if isinstance(time, Mapping) else {}
        with suppress(OSError):
            file = self.storage.log_file(self.file("attempts.jsonl"))
            file.write((json.dumps(known) + "\n").encode())
            file.flush()
            file.close()

    def _renew(self) -> None:
        while not self._closing.wait(LEASE_SECONDS):
            with self._guard:
                if self._closing.is_set():
                    return
                try:
                    self._lock.renew(Owner.here(self.attempt))
                    self._write_status(durable=False)
                except FolderInUseError as error:
                    self.lost = str(error)
                    return
                except OSError:  # a full or absent disk fails the next save, which says so
                    continue

    def _write_status(self, *, durable: bool) -> None:
        if (
            self.rank or "state" not in self._status or self.lost
        ):  # until this attempt has one, that of the attempt before stands
            return
        heartbeat = {"at": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        self._status = {**self._status, **self.watch()}
        content = self._status | {"heartbeat": heartbeat}
        self.storage.replace_json(self.file("status.json"), content, durable=durable)


def count(status: Mapping[str, Any], key: str) -> int:
    """Return a number out of status.json, 0 where it is not there or was damaged by hand."""
    value = status.get(key)
    if isinstance(value, int):
        return value
    return 0
