"""Trackers that cannot be unwritten: a spool in the run folder, and a thread that hands it on to a
backend.

Every record is a line of the spool, a file that a resume cuts back like metrics.jsonl. The number
of the line, from 0, is the record's identity. What a committed checkpoint covers will never be done
again, so up to there the thread hands records on, in order. A backend says how many records it has
when it is connected, so after any kill, on either side, each record is there once. A record made
again of which it already has one (`live`, or a resume that had to fall back to an older checkpoint)
is not handed on, and the backend gets a note of it.
"""

import fcntl
import json
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

from phasetrain.errors import ConfigError
from phasetrain.hooks.base import Run
from phasetrain.hooks.trackers.base import Record, Tracker
from phasetrain.runtime.storage import LogFile

log = logging.getLogger(__name__)

AT_ONCE = 100
"""Records handed on in one call."""

FIRST_DELAY = 1.0
LAST_DELAY = 60.0
"""Seconds before a failed backend is tried again; each time twice as many."""

TRIES_AT_END = 2
"""Failures that end the wait for the backend once the run is over."""

Ending = Literal["finished", "preempted", "failed"]


@dataclass(frozen=True)
class Target:
    """The run as a backend knows it.

    Attributes:
        identity: of this run among all, the same in all its attempts.
        folder: the run folder.
        hparams: values of the config by dotted path.
    """

    identity: str
    folder: Path
    hparams: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Where records go; called from one thread, may raise anything, and may take as long as it
    likes."""

    def connect(self) -> int:
        """Open the run, or open it again, and return how many records it has."""
        ...

    def send(self, first: int, records: Sequence[Record]) -> None:
        """Take records; `first` is the number of the first one."""
        ...

    def note(self, name: str, value: str) -> None:
        """Put a word about the run beside its records."""
        ...

    def close(self, ending: Ending) -> None:
        """Hand everything on and close the run, for now or for good."""
        ...

    def abandon(self) -> None:
        """Let go of what a failure has left behind."""
        ...


class Spool:
    """Reads the lines of a spool by number; the first line of the file is its head.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._offset = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until nobody else reads the spool to hand it on, such as a thread of an attempt that
        gave it up."""
        with open(self._path, "rb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self, first: int, until: int) -> Iterator[Record]:
        """Yield the records `first` to `until - 1`, as far as they are in the file."""
        with open(self._path, "rb") as file:
            if first < self._number or not self._offset:
                file.readline()
                self._number = 0
                self._offset = file.tell()
            file.seek(self._offset)
            while self._number < until:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                self._number, self._offset = self._number + 1, file.tell()
                if self._number > first:
                    yield Record.from_json(json.loads(line))


class Sender:
    """Hands records on in a thread, and tries again when that fails.

    Args:
        label: for messages.
        backend: where they go.
        spool: where they come from.
        made: records that the spool holds at the start.
        flush: hands what was written to the spool to the system.
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
        self._thread = threading.Thread(target=self._work, name=f"phasetrain-{label}", daemon=True)

    def start(self) -> None:
        """Begin to hand on."""
        self._thread.start()

    def offer(self, count: int) -> None:
        """Let the first `count` records be handed on."""
        self.offered = count
        self._news.set()

    def close(self, ending: Ending, seconds: float) -> int:
        """Hand on what is left, for at most so many seconds, and return how many records are left
        then."""
        self._ending = ending
        self._hurry.set()
        self._news.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.error = self.error or f"it did not take them within {seconds:g} s"
            self._given_up.set()
        return max(0, self.offered - self._most)

    def _work(self) -> None:
        try:
            with self._spool.held():
                self._hand_on()
        except OSError as error:
            self._failed(error)

    def _hand_on(self) -> None:
        delay = FIRST_DELAY
        while not self._given_up.is_set():
            try:
                if self._turn():
                    return
                self.error = ""
                delay = FIRST_DELAY
            except BaseException as error:  # noqa: BLE001 - a library may raise SystemExit; nothing may reach the run
                if self._failed(error):
                    return
                if self._ending:
                    self._given_up.wait(FIRST_DELAY)
                else:
                    self._hurry.wait(delay)
                delay = min(2 * delay, LAST_DELAY)

    def _turn(self) -> bool:
        """Hand some records on, or wait for more; return whether everything is over."""
        self._news.clear()  # before all that is looked at: what comes later ends the wait below
        ending = self._ending
        if self.sent is None:
            self.sent = self._connected()
        if self.sent < self.offered:
            self._flush()
            records = list(self._spool.read(self.sent, min(self.offered, self.sent + AT_ONCE)))
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

    def _connected(self) -> int:
        has = self._backend.connect()
        if (
            has > self._made and not self._compared
        ):  # later connections find what this thread has sent
            text = f"records {self._made} to {has - 1} were made again and not sent again"
            self._backend.note("redone", text)
            log.info("HOOKS.%s: %s", self._label, text)
        self._most, self._compared = max(has, self._most), True
        return has

    def _failed(self, error: BaseException) -> bool:
        """Take note of a failure; return whether to give up."""
        self.sent = None
        self.error = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        log.debug("HOOKS.%s: it failed", self._label, exc_info=error)
        if not self._warned:
            self._warned = True
            log.warning(
                "HOOKS.%s: the backend fails and is tried again; the run goes on: %s",
                self._label,
                self.error,
            )
        try:
            self._backend.abandon()
        except Exception as second:
            log.debug("HOOKS.%s: it could not be let go either", self._label, exc_info=second)
        self._failures_at_end += bool(self._ending)
        return self._failures_at_end >= TRIES_AT_END


class Remote(Tracker):
    """A tracker whose backend cannot be unwritten.

    Args:
        every_updates: send a train step after each so many updates.
        live: send records at once, rather than when a checkpoint covers them.
        wait_seconds: how long the end of a finished run waits for the backend; one that was stopped
            waits 5 s at most.
        hparams: fact; values of the config by dotted path.

    Attributes:
        kind: the name of the hook, of its spool and of its folder.
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
        self._warned = False

    @abstractmethod
    def backend(self, target: Target) -> Backend:
        """Return what to send records to; raises ConfigError where its package is missing. It must
        not connect."""

    def on_start(self, run: Run) -> None:
        """Cut the spool back to what the checkpoint covers, and start to send."""
        assert run.folder is not None, "a tracker needs a run folder"
        storage = run.folder.storage
        if not storage.keeps_files:
            raise ConfigError(
                f"HOOKS.{self.kind} keeps a spool in files of this machine, and RUN.dir = {run.folder.path!r} is none; "
                f"leave it out with HOOKS.{self.kind}=null, metrics.jsonl has the same numbers"
            )
        folder = Path(storage.local(run.folder.path))
        self._file = run.folder.log(f"{self.kind}.jsonl")
        identity = self._cut(self._file)
        backend = self.backend(Target(identity, folder, self.hparams))
        self._sender = Sender(
            self.kind, backend, Spool(folder / f"{self.kind}.jsonl"), self._lines, self._flush
        )
        self._sender.start()

    def write(self, run: Run, record: Record) -> None:
        """Put a record at the end of the spool."""
        if self._file is None:
            return
        line = (json.dumps(record.to_json()) + "\n").encode()
        self._file.write(line)
        self._lines, self._size = self._lines + 1, self._size + len(line)
        if self.live and self._sender is not None:
            self._sender.offer(self._lines)

    def on_save(self, run: Run) -> None:
        """Hand every line to the system and note how far the checkpoint goes."""
        self._flush()
        self._saving = self._lines

    def on_saved(self, run: Run) -> None:
        """Send what the checkpoint covers."""
        if self._sender is not None:
            self._sender.offer(max(self._saving, self._sender.offered))

    def on_end(self, run: Run) -> None:
        """Note whether the run has finished or was stopped."""
        self._ending = "preempted" if run.stopping and run.consensus.interrupted else "finished"

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Note whether it has failed, or was stopped from outside."""
        self._ending = "failed" if isinstance(error, Exception) else "preempted"

    def close(self) -> None:
        """Send what is left, as far as that is possible, and say what is not sent."""
        self._flush()
        if self._sender is None:
            return
        seconds = self.wait_seconds if self._ending == "finished" else min(self.wait_seconds, 5.0)
        left = self._sender.close(self._ending, seconds)
        if left:
            if self._ending == "finished":
                what_then = f"send them with phasetrain.hooks.{type(self).__name__}(...).deliver(RUN_FOLDER)"
            else:
                what_then = "the next attempt sends them"
            log.warning(
                "HOOKS.%s: %d of %d records are not sent (%s); they are kept in %s.jsonl, and %s",
                self.kind, left, self._lines, self._sender.error, self.kind, what_then,
            )  # fmt: skip

    def deliver(self, folder: str) -> int:
        """Send what a finished run could not send, and return how many records its spool has.

        Args:
            folder: the run folder.

        Raises:
            ConfigError: there is no spool, the run has not finished, or the backend fails.
        """
        place = Path(folder)
        path = Path(folder) / f"{self.kind}.jsonl"
        identity = _identity(path.read_bytes() if path.is_file() else b"")
        status = place / "status.json"
        if status.is_file():
            state = json.loads(status.read_text(encoding="utf-8")).get("state")
        else:
            state = None
        if not identity or state != "finished":
            raise ConfigError(
                f"{folder!r} is no finished run with a {path.name}; a run that goes on sends its records itself"
            )
        count = path.read_bytes().count(b"\n") - 1
        sender = Sender(
            self.kind, self.backend(Target(identity, place, self.hparams)), Spool(path), count
        )
        sender.start()
        left = sender.close("finished", self.wait_seconds)
        if left:
            raise ConfigError(
                f"{left} of {count} records of {folder!r} are not sent: {sender.error}"
            )
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return how far into the spool a checkpoint covers, in lines and in bytes."""
        return {"lines": self._lines, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint covers; the spool is cut at `on_start`."""
        self._lines = int(state["lines"])
        self._size = int(state["size"])

    def _cut(self, file: LogFile) -> str:
        """Cut the spool back and return the identity in its head; without one it begins anew, as
        another run."""
        content = file.read()
        identity = _identity(content)
        if not identity or (self._size and len(content) < self._size):
            if self._size:
                log.warning("%s was damaged: HOOKS.%s goes on as a new run", file.path, self.kind)
            identity = uuid4().hex[:12]
            head = b""
            file.cut(0)
        else:
            head = content[: content.index(b"\n") + 1]
            file.cut(self._size or len(head))
        if not head or not self._size:
            self._lines = 0
        if not head:
            head = (json.dumps({"kind": self.kind, "run": identity}) + "\n").encode()
            file.write(head)
            self._size = 0
        self._size = self._size or len(head)
        file.sync()  # the identity stands before anybody is told of it
        return identity

    def _flush(self) -> None:
        error = None if self._file is None else self._file.flush()
        if error is not None and not self._warned:
            log.warning(
                "%s.jsonl cannot be written now: %s; records are kept in memory", self.kind, error
            )
        self._warned = error is not None


def _identity(content: bytes) -> str:
    """Return the identity in the head of a spool; empty where it has none."""
    try:
        found = json.loads(content.partition(b"\n")[0]).get("run", "")
    except (ValueError, AttributeError):
        return ""
    if isinstance(found, str):
        return found
    return ""
