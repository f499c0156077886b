"""Trackers whose output cannot be truncated: a spool file, and a thread that sends its records.

Every record is a line of the spool, a file that a resume truncates like metrics.jsonl. The number
of the line, from 0, identifies the record. Steps before a committed checkpoint are never repeated,
so the thread sends the records up to there, in order. A backend reports how many records it has
when it is connected, so each record arrives exactly once after any kill on either side. A repeated
record that the backend already has (with `live`, or after a fallback to an older checkpoint) is
not sent again, and the backend gets a note about it.
"""

import fcntl
import json
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

from phasetrain.addons.observe.trackers.base import (
    MediaRecord,
    Record,
    Tracker,
    require_local_folder,
)
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import Run
from phasetrain.runs.view import read_status
from phasetrain.runtime.storage import LogFile

log = logging.getLogger(__name__)

BATCH_SIZE = 100
"""Records sent in one call."""

FIRST_DELAY = 1.0
LAST_DELAY = 60.0
"""Seconds before a failed backend is tried again; doubled after each failure."""

TRIES_AT_END = 2
"""Failures after the end of the run that end the wait for the backend."""

Ending = Literal["finished", "preempted", "failed"]


@dataclass(frozen=True)
class Target:
    """The run that a backend writes to.

    Attributes:
        identity: unique identifier of the run, equal in all attempts.
        folder: the run folder.
        hparams: values of the config by dotted path.
    """

    identity: str
    folder: Path
    hparams: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """The service that records are sent to; called from one thread, may raise and may block."""

    def connect(self) -> int:
        """Open the run, perhaps again, and return the number of its records."""
        ...

    def send(self, first: int, records: Sequence[Record]) -> None:
        """Send records; `first` is the number of the first one."""
        ...

    def note(self, name: str, value: str) -> None:
        """Attach a note to the run."""
        ...

    def close(self, ending: Ending) -> None:
        """Flush all records and close the run, which may be opened again unless it finished."""
        ...

    def abandon(self) -> None:
        """Release resources after a failure."""
        ...


class Spool:
    """Reads the records of a spool by number; the first line of the file is a header.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._offset = 0

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Wait until no other process sends this spool, such as an attempt that hangs."""
        with open(self._path, "rb") as file:
            with suppress(OSError):  # not every file system has locks
                # The system releases it when the process dies, so no kill leaves a lock behind.
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self, first: int, until: int) -> Iterator[Record]:
        """Yield the records `first` to `until - 1` that the file has."""
        with open(self._path, "rb") as file:
            # After a reconnection the backend may have fewer records than were read already.
            if first < self._number or not self._offset:
                file.readline()
                self._number = 0
                self._offset = file.tell()
            file.seek(self._offset)
            while self._number < until:
                line = file.readline()
                # Not flushed completely, or torn by a kill.
                if not line.endswith(b"\n"):
                    return
                self._number += 1
                self._offset = file.tell()
                if self._number > first:
                    yield Record(**json.loads(line))


class Sender:
    """Sends records in a thread, and tries again after a failure.

    Args:
        label: label of the hook, for messages.
        backend: receives the records.
        spool: the records.
        made: number of records in the spool at the start.
        flush: flushes the spool file.
    """

    def __init__(
        self,
        label: str,
        backend: Backend,
        spool: Spool,
        made: int,
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        self._label = label
        self._backend = backend
        self._spool = spool
        self._made = made
        self._flush = flush
        self.sent: int | None = None
        self._most = 0
        self._compared = False
        self.offered = made
        self.error = ""
        self._warned = False
        self._failures_at_end = 0
        self._ending: Ending | None = None
        self._news = threading.Event()
        self._hurry = threading.Event()
        self._given_up = threading.Event()
        # A daemon thread: a backend that blocks forever must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"phasetrain-{label}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def offer(self, count: int) -> None:
        """Allow the first `count` records to be sent."""
        self.offered = count
        self._news.set()

    def close(self, ending: Ending, seconds: float) -> int:
        """Send the remaining records for at most `seconds`; return the number of unsent records."""
        self._ending = ending
        self._hurry.set()
        self._news.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.error = self.error or f"it did not accept them within {seconds:g} s"
            self._given_up.set()
        return max(0, self.offered - self._most)

    def _work(self) -> None:
        try:
            with self._spool.lock():
                self._send_until_closed()
        except OSError as error:
            self._handle_failure(error)

    def _send_until_closed(self) -> None:
        delay = FIRST_DELAY
        while not self._given_up.is_set():
            try:
                if self._send_batch():
                    return
                self.error = ""
                delay = FIRST_DELAY
            except BaseException as error:  # noqa: BLE001 - a library may raise SystemExit
                if self._handle_failure(error):
                    return
                # `close` has set `_hurry`, which would no longer wait.
                if self._ending:
                    self._given_up.wait(FIRST_DELAY)
                else:
                    self._hurry.wait(delay)
                delay = min(2 * delay, LAST_DELAY)

    def _send_batch(self) -> bool:
        """Send a batch of records, or wait for more; return whether everything was sent."""
        # Cleared before anything is read, so that news which arrive later end the wait below.
        self._news.clear()
        ending = self._ending
        if self.sent is None:
            self.sent = self._connect()
        if self.sent < self.offered:
            # The spool is read from disk, and its last lines may still be in the buffer.
            self._flush()
            records = list(self._spool.read(self.sent, min(self.offered, self.sent + BATCH_SIZE)))
            if records:
                self._backend.send(self.sent, records)
                self.sent += len(records)
                self._most = max(self._most, self.sent)
                return False
        if ending:
            self._backend.close(ending)
            return True
        self._news.wait()
        return False

    def _connect(self) -> int:
        has = self._backend.connect()
        # Only the first connection can tell: later ones find the records that this thread has sent.
        if has > self._made and not self._compared:
            text = f"records {self._made} to {has - 1} were repeated and not sent again"
            self._backend.note("redone", text)
            log.info("HOOKS.%s: %s", self._label, text)
        self._most = max(has, self._most)
        self._compared = True
        return has

    def _handle_failure(self, error: BaseException) -> bool:
        """Log a failure and release the backend; return whether to give up."""
        self.sent = None
        self.error = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        log.debug("HOOKS.%s: the backend failed", self._label, exc_info=error)
        if not self._warned:
            self._warned = True
            log.warning(
                "HOOKS.%s: the backend failed and will be retried; the run continues: %s",
                self._label,
                self.error,
            )
        try:
            self._backend.abandon()
        except Exception as second:
            log.debug("HOOKS.%s: the backend was not released", self._label, exc_info=second)
        self._failures_at_end += bool(self._ending)
        return self._failures_at_end >= TRIES_AT_END


class SpooledTracker(Tracker):
    """Base class of trackers that send records to a service.

    Args:
        every_updates: updates between two records of train steps.
        live: send records at once instead of after a checkpoint covers them.
        wait_seconds: maximum wait for the backend at the end of a finished run; a stopped run
            waits at most 5 s.
        hparams: values of the config by dotted path; passed by the program.

    Attributes:
        kind: name of the hook, of its spool and of its folder.
    """

    kind = ""

    def __init__(
        self,
        every_updates: int = 10,
        wait_seconds: float = 30.0,
        *,
        live: bool = False,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every_updates)
        if wait_seconds < 0:
            raise ValueError(f"wait_seconds = {wait_seconds}: expected at least 0")
        self.live = live
        self.wait_seconds = wait_seconds
        self.hparams = hparams or {}
        self._file: LogFile | None = None
        self._sender: Sender | None = None
        self._lines = 0
        self._size = 0
        self._saving = 0
        self._ending: Ending = "failed"

    @abstractmethod
    def make_backend(self, target: Target) -> Backend:
        """Return the backend, not yet connected.

        Raises:
            ConfigError: its package is not installed.
        """

    def on_start(self, run: Run) -> None:
        """Truncate the spool to the checkpoint, and start the sender."""
        assert run.folder is not None, "a tracker needs a run folder"
        folder = require_local_folder(run.folder, self.kind)
        self._file = run.folder.log(f"{self.kind}.jsonl")
        identity = self._truncate_spool(self._file)
        backend = self.make_backend(Target(identity, folder, self.hparams))
        spool = Spool(folder / f"{self.kind}.jsonl")
        self._sender = Sender(self.kind, backend, spool, self._lines, self._flush_spool)
        self._sender.start()

    def write(self, run: Run, record: Record) -> None:
        """Append a record to the spool."""
        if self._file is None:
            return
        content = {key: value for key, value in vars(record).items() if key != "item" or value}
        line = (json.dumps(content) + "\n").encode()
        self._file.write(line)
        self._lines += 1
        self._size += len(line)
        if self.live and self._sender is not None:
            self._sender.offer(self._lines)

    def write_media(self, run: Run, record: MediaRecord, content: bytes) -> None:
        """Append an item to the spool; its file is in the run folder."""
        phase = run.plan.phases[record.phase]
        self.write(
            run,
            Record(
                kind="media",
                split=phase.split,
                phase=phase.index,
                epoch=phase.epoch,
                step=record.step,
                updates=record.updates,
                samples=run.state.samples,
                values={},
                at=time.time(),
                item={"tag": record.tag, "kind": record.kind, "file": record.file},
            ),
        )

    def on_save(self, run: Run) -> None:
        """Flush the spool, and remember which records the checkpoint covers."""
        self._flush_spool()
        # Lines that are added while the checkpoint is being written are not covered by it.
        self._saving = self._lines

    def on_saved(self, run: Run) -> None:
        """Send the records that the checkpoint covers."""
        if self._sender is not None:
            self._sender.offer(max(self._saving, self._sender.offered))

    def on_end(self, run: Run) -> None:
        """Remember whether the run finished or was stopped."""
        self._ending = "finished"
        if run.stopping and run.consensus.interrupted:
            self._ending = "preempted"

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Remember whether the run failed, or was stopped by a signal."""
        self._ending = "failed" if isinstance(error, Exception) else "preempted"

    def close(self) -> None:
        """Send the remaining records, and log how many could not be sent."""
        self._flush_spool()
        if self._sender is None:
            return
        # After a stop the process may be killed soon, and the next attempt sends the rest.
        seconds = self.wait_seconds if self._ending == "finished" else min(self.wait_seconds, 5.0)
        left = self._sender.close(self._ending, seconds)
        if left:
            advice = "the next attempt sends them"
            if self._ending == "finished":
                hook = f"phasetrain.hooks.{type(self).__name__}"
                advice = f"send them with {hook}(...).deliver(RUN_FOLDER)"
            log.warning(
                "HOOKS.%s: %d of %d records are not sent (%s); they are kept in %s.jsonl, and %s",
                self.kind,
                left,
                self._lines,
                self._sender.error,
                self.kind,
                advice,
            )

    def deliver(self, folder: str) -> int:
        """Send the records that a finished run could not send; return the number of all records.

        Args:
            folder: the run folder.

        Raises:
            ConfigError: there is no spool, the run has not finished, or the backend fails.
        """
        run_path = Path(folder)
        path = Path(folder) / f"{self.kind}.jsonl"
        identity = _read_identity(path.read_bytes() if path.is_file() else b"")
        if not identity or read_status(run_path).state != "finished":
            raise ConfigError(
                f"{folder!r} is not a finished run with a {path.name}; an unfinished run sends its "
                "records when it is resumed",
                code="tracker.no_spool",
            )
        count = path.read_bytes().count(b"\n") - 1
        backend = self.make_backend(Target(identity, run_path, self.hparams))
        sender = Sender(self.kind, backend, Spool(path), count)
        sender.start()
        left = sender.close("finished", self.wait_seconds)
        if left:
            raise ConfigError(
                f"{left} of {count} records of {folder!r} are not sent: {sender.error}; re-run "
                "the command to send them",
                code="tracker.not_sent",
            )
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the spool in lines and in bytes."""
        return {"lines": self._lines, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the size; `on_start` truncates the spool."""
        self._lines = int(state["lines"])
        self._size = int(state["size"])

    def _truncate_spool(self, file: LogFile) -> str:
        """Truncate the spool and return its identity; a damaged spool is started again."""
        content = file.read()
        identity = _read_identity(content)
        if identity and len(content) >= self._size:
            head = content[: content.index(b"\n") + 1]
            file.truncate(self._size or len(head))
        else:
            if self._size:
                log.warning("%s is damaged: HOOKS.%s starts a new run", file.path, self.kind)
            # The backend has records under the old identity that this spool lacks.
            identity = uuid4().hex[:12]
            head = (json.dumps({"kind": self.kind, "run": identity}) + "\n").encode()
            file.truncate(0)
            file.write(head)
            self._size = 0
        if not self._size:
            self._lines = 0
            self._size = len(head)
        file.sync()  # the backend must never see an identity that a crash could lose
        return identity

    def _flush_spool(self) -> None:
        if self._file is not None:
            self._file.flush_or_warn()


def _read_identity(content: bytes) -> str:
    """Return the identity in the header of a spool, or an empty string."""
    try:
        identity = json.loads(content.partition(b"\n")[0]).get("run", "")
    except (ValueError, AttributeError):
        return ""
    if isinstance(identity, str):
        return identity
    return ""
