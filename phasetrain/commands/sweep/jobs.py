"""The runs of a sweep: each one a process of its own, with its record beside its run folder."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig

from phasetrain.commands.sweep.override_text import digest, own_words, quoted
from phasetrain.errors import FolderInUseError
from phasetrain.runs.lock import Owner, holder, process_start
from phasetrain.runtime.live_view import LastingStream
from phasetrain.runtime.signals import stop_signals
from phasetrain.runtime.storage import open_storage

NAME = "[0-9a-f]" * 8 + ".json"
"""Names of records, as a pattern."""

NUMBER_KEY = "run"
"""Key under which Hydra gives a job its place in the batch."""

LOOK_SECONDS = 0.2
"""Between two looks at whether processes that were asked to end have ended."""


@dataclass(frozen=True)
class Record:
    """What is known of one run of a sweep, as it stands in `{digest}.json`.

    Attributes:
        sweep: identity of the call of `sweep` that looked at it last.
        overrides: its words, all of them.
        swept: those that other runs have otherwise, key -> value as text.
        folder: its run folder.
        exit_code: None while it runs, and for good where its end was not seen.
        pid, host: its process.
        passed_over: whether it had finished before, so that nothing was started.
    """

    sweep: str
    overrides: list[str]
    swept: dict[str, str]
    folder: str
    exit_code: int | None = None
    pid: int = 0
    host: str = ""
    passed_over: bool = False

    def write(self, sweep_folder: str) -> None:
        """Write it down, whole or not at all."""
        path = f"{sweep_folder}/{digest(self.overrides)}.json"
        open_storage(sweep_folder).replace_json(path, asdict(self), durable=False)


def records(sweep_folder: str) -> list[Record]:
    """Return the records in a sweep folder, in order of their names; one that cannot be read is
    left out."""
    found = (_read(path) for path in sorted(Path(sweep_folder).glob(NAME)))
    return [one for one in found if one is not None]


def _read(path: Path) -> Record | None:
    try:
        one = Record(**{"swept": {}, **json.loads(path.read_text("utf-8"))})
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = [one.sweep, one.folder, one.host]
    if (
        not isinstance(one.overrides, list)
        or not isinstance(one.swept, dict)
        or not isinstance(one.pid, int)
    ):
        return None
    texts += [*one.overrides, *one.swept, *one.swept.values()]
    whole = one.exit_code is None or isinstance(one.exit_code, int)
    if whole and all(isinstance(text, str) for text in texts):
        return one
    return None


@dataclass(frozen=True)
class Stop:
    """Asks the jobs of a sweep to end, in whatever process of this machine they are.

    Args:
        folder: of the sweep.
        sweep: its identity.
    """

    folder: str
    sweep: str

    @property
    def path(self) -> Path:
        """A file that holds the number of the signal, and is there once one has come."""
        return Path(self.folder, f".stop-{self.sweep}")

    def asked(self) -> int:
        """Return the number of the signal that has come; 0 where none has."""
        try:
            return int(self.path.read_text() or 0)
        except (OSError, ValueError):
            return 0

    def ask(self, number: int) -> None:
        """Let no job start any more, and pass the signal on to those that run."""
        with suppress(OSError):
            self.path.write_text(str(number))
        if number == signal.SIGINT and _in_foreground():
            return  # the terminal gives every process one of its own
        for one in self.running():
            with suppress(OSError):
                os.kill(one.pid, number)

    def running(self) -> list[Record]:
        """Return the records of those jobs of this sweep that run on this machine."""
        here = socket.gethostname()
        return [
            one
            for one in records(self.folder)
            if one.sweep == self.sweep
            and one.exit_code is None
            and one.host == here
            and _alive(one.pid)
        ]

    def wait(self) -> None:
        """Return once no job of this sweep runs on this machine."""
        while self.running():
            time.sleep(LOOK_SECONDS)

    def forget(self) -> None:
        """Take the file away."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Job:
    """What a launcher of Hydra calls once per combination, in whatever process it chose.

    Attributes:
        command: what starts the program.
        fixed: overrides that all combinations share.
        folder: the sweep folder.
        sweep: identity of this call of `sweep`, so that results of an earlier one are not taken for
            its own.
        monitor: the metric by which they are compared, with a minus sign where smaller is better;
            empty for none.
        batch: number, from 1, and swept words of each run to launch; empty where a sweeper of Hydra
            chooses them.
        total: how many runs there are; 0 where it is not known.
        launcher: host, process and its start of what launches; elsewhere what a run prints goes to
            `{digest}.log`.
    """

    command: tuple[str, ...]
    fixed: tuple[str, ...]
    folder: str
    sweep: str
    monitor: str = ""
    batch: tuple[tuple[int, tuple[str, ...]], ...] = ()
    total: int = 0
    launcher: tuple[str, int, int | None] = field(default_factory=lambda: _here())

    @property
    def stop(self) -> Stop:
        """What asks it to end."""
        return Stop(self.folder, self.sweep)

    def __call__(self, config: Any) -> None:
        """Run one combination to its end; nothing where the sweep has been asked to end, or was
        killed."""
        apart = _here() != self.launcher
        if self.stop.asked() or (apart and self._is_orphan()):
            return
        if self.batch:
            number, swept = self.batch[int(config[NUMBER_KEY])]
        else:
            found = HydraConfig.get()
            number = int(found.job.num) + 1
            swept = tuple(own_words(found.overrides.task))
        told = f"run {number}{f' of {self.total}' if self.total else ''}: {' '.join(swept) or 'no values'}"
        record = self.record(swept)
        if not apart:
            _say(told)
        code = self._process(record, apart=apart)
        if apart:
            _say(f"{told}: exit code {code}" + (f", see {record.folder}.log" if code else ""))

    def record(self, swept: Sequence[str]) -> Record:
        """Return the record of a run that has not been started.

        Args:
            swept: its words beside the fixed ones.
        """
        overrides = [*self.fixed, *swept]
        known = {key: value for key, _, value in (word.partition("=") for word in swept)}
        return Record(self.sweep, overrides, known, f"{self.folder}/{digest(overrides)}")

    def _is_orphan(self) -> bool:
        host, pid, started = self.launcher
        return (
            host == socket.gethostname() and started is not None and process_start(pid) != started
        )

    def _process(self, record: Record, *, apart: bool) -> int:
        while True:
            self._wait_for_another(record)
            if number := self.stop.asked():
                return 128 + number
            code = self._started(record, apart=apart)
            if code != FolderInUseError.exit_code or self.stop.asked() or not _held(record):
                break  # somebody else was faster
        now = _read(Path(f"{record.folder}.json"))
        if now is None or now.sweep == self.sweep:  # else another call has taken over
            replace(now or record, exit_code=code).write(self.folder)
        return code

    def _wait_for_another(self, record: Record) -> None:
        """Wait for the run in the same folder that a sweep has left behind which was killed."""
        if (owner := _held(record)) is not None:
            _say(
                f"{record.folder} is in use by process {owner.pid}, perhaps of a sweep that was killed; waiting for it"
            )
        while _held(record) is not None and not self.stop.asked():
            time.sleep(LOOK_SECONDS)

    def _started(self, record: Record, *, apart: bool) -> int:
        words = [*self.command, *record.overrides, f"RUN.dir={quoted(record.folder)}"]
        with (
            _output(Path(f"{record.folder}.log") if apart else None) as output,
            handled(self._on_signal),
        ):
            process = subprocess.Popen(words, stdout=output, stderr=output)
            record = replace(record, pid=process.pid, host=socket.gethostname())
            record.write(self.folder)
            if number := self.stop.asked():  # since it was looked for last
                process.send_signal(number)
            code = process.wait()
        if code >= 0:
            return code
        return 128 - code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.stop.ask(number)


@contextmanager
def _output(path: Path | None) -> Iterator[Any]:
    if path is None:
        yield None
        return
    with path.open("ab") as file:
        yield file


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle what asks a run to stop; other threads than the main one are not told of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _in_foreground() -> bool:
    """Tell whether this process is among those to which a terminal sends what is typed."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _here() -> tuple[str, int, int | None]:
    return socket.gethostname(), os.getpid(), process_start(os.getpid())


def _held(record: Record) -> Owner | None:
    """Return what runs in the folder of a run on this machine."""
    return holder(record.folder, open_storage(record.folder))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _say(line: str) -> None:
    stream = LastingStream(sys.stdout)  # the terminal may have been closed
    stream.write(f"{line}\n")
    stream.flush()
