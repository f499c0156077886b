"""The runs of a sweep: each is a process with its own run folder, and a record next to it."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from hydra.core.hydra_config import HydraConfig

from phasetrain.addons.experiments.sweep.override_text import (
    hash_overrides,
    split_words,
    strip_prefixes,
)
from phasetrain.addons.experiments.warm.start import start_process
from phasetrain.config.compose.override_text import quote_value
from phasetrain.errors import FolderInUseError
from phasetrain.runs.owner import Owner, find_owner, process_start
from phasetrain.runs.records import process_exists
from phasetrain.runtime.child_processes import convert_exit_code, handle_signals
from phasetrain.runtime.live_view import LastingStream
from phasetrain.runtime.signals import is_in_foreground
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import IN_SWEEP

RECORD_PATTERN = "[0-9a-f]" * 8 + ".json"

NUMBER_KEY = "run"
"""Key under which Hydra passes a job its place in the batch."""

POLL_SECONDS = 0.2
"""Interval at which processes that were asked to stop are looked at."""


@dataclass(frozen=True)
class JobRecord:
    """The record of one run of a sweep, in `{hash}.json`.

    Attributes:
        sweep: identity of the call of `sweep` that looked at it last.
        overrides: all overrides of the run.
        swept: key -> value as text, of the overrides in which runs differ.
        folder: its run folder.
        exit_code: None while it runs, and for good if its end was not observed.
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
        """Write the record atomically."""
        path = f"{sweep_folder}/{hash_overrides(self.overrides)}.json"
        # No fsync: the run folder has the durable state, and a lost record is written again.
        open_storage(sweep_folder).replace_json(path, asdict(self), durable=False)

    def has_valid_types(self) -> bool:
        """Return whether every field has its type; a file may have been edited by hand."""
        if not (
            isinstance(self.overrides, list)
            and isinstance(self.swept, dict)
            and isinstance(self.pid, int)
            and isinstance(self.exit_code, int | None)
        ):
            return False
        texts = [self.sweep, self.folder, self.host]
        texts += [*self.overrides, *self.swept, *self.swept.values()]
        return all(isinstance(text, str) for text in texts)


def read_job_records(sweep_folder: str) -> list[JobRecord]:
    """Return the records in a sweep folder, sorted by name; unreadable ones are skipped."""
    records = (_read_record(path) for path in sorted(Path(sweep_folder).glob(RECORD_PATTERN)))
    return [record for record in records if record is not None]


def _read_record(path: Path) -> JobRecord | None:
    try:
        # Records of older versions have no `swept`.
        record = JobRecord(**{"swept": {}, **json.loads(path.read_text("utf-8"))})
    except (OSError, ValueError, TypeError, RecursionError):
        return None  # unknown keys raise TypeError: a record of a future version is skipped
    if record.has_valid_types():
        return record
    return None


@dataclass(frozen=True)
class StopRequest:
    """Asks the jobs of a sweep to stop, in any process of this machine.

    The request is a file, because a launcher of Hydra may run jobs in other processes.

    Args:
        folder: the sweep folder.
        sweep: identity of the call of `sweep`.
    """

    folder: str
    sweep: str

    @property
    def path(self) -> Path:
        """The file with the number of the signal; it exists once a signal has come."""
        return Path(self.folder, f".stop-{self.sweep}")

    def signal_number(self) -> int:
        """Return the number of the signal that has come, 0 if none has."""
        try:
            # empty between the opening and the writing of the file by another process
            return int(self.path.read_text() or 0)
        except (OSError, ValueError):
            return 0

    def send(self, number: int) -> None:
        """Let no further job start, and forward the signal to running ones."""
        # The file before the signals: a job that starts in between finds it.
        with suppress(OSError):
            self.path.write_text(str(number))
        if number == signal.SIGINT and is_in_foreground():
            return  # the terminal has sent Ctrl-C to every process of the foreground group
        for record in self.list_running():
            with suppress(OSError):
                os.kill(record.pid, number)

    def list_running(self) -> list[JobRecord]:
        """Return the records of the jobs of this sweep that run on this machine."""
        here = socket.gethostname()
        return [
            record
            for record in read_job_records(self.folder)
            if record.sweep == self.sweep
            and record.exit_code is None
            and record.host == here
            and process_exists(record.pid)
        ]

    def wait(self) -> None:
        """Return once no job of this sweep runs on this machine."""
        while self.list_running():
            time.sleep(POLL_SECONDS)

    def clear(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Job:
    """The callable that a launcher of Hydra calls once per run, in a process of its choice.

    Attributes:
        command: command line that starts the program.
        fixed: overrides that all runs share.
        folder: the sweep folder.
        sweep: identity of this call of `sweep`, to tell its results from earlier ones.
        monitor: metric by which runs are compared, with a minus sign if smaller is better; empty
            for none.
        batch: number, from 1, and swept overrides of each run to launch; empty if a sweeper of
            Hydra chooses them.
        total: number of runs; 0 if unknown.
        pauses: name of a run -> update at which it pauses, see RUN.pause_at. It is no part of the
            overrides: a run keeps its name and its record when it continues.
        launcher: host, pid and start time of the launching process; a run started by another
            process writes its output to `{hash}.log`.
    """

    command: tuple[str, ...]
    fixed: tuple[str, ...]
    folder: str
    sweep: str
    monitor: str = ""
    batch: tuple[tuple[int, tuple[str, ...]], ...] = ()
    total: int = 0
    pauses: Mapping[str, int] = field(default_factory=dict)
    launcher: tuple[str, int, int | None] = field(default_factory=lambda: _identify_process())

    @property
    def stop(self) -> StopRequest:
        """The request that ends the runs."""
        return StopRequest(self.folder, self.sweep)

    def __call__(self, config: Any) -> None:
        """Run one combination to its end; do nothing after a stop request or if the launching
        process was killed."""
        # Launchers pickle the job and call it anywhere; only a comparison shows where it runs.
        is_remote = _identify_process() != self.launcher
        if self.stop.signal_number() or (is_remote and self._is_orphan()):
            return
        if self.batch:
            number, swept = self.batch[int(config[NUMBER_KEY])]
        else:
            hydra_config = HydraConfig.get()
            number = int(hydra_config.job.num) + 1  # Hydra counts from 0
            swept = tuple(strip_prefixes(hydra_config.overrides.task))
        of_total = f" of {self.total}" if self.total else ""
        title = f"run {number}{of_total}: {' '.join(swept) or 'no values'}"
        record = self.make_record(swept)
        pause_at = self.pauses.get(hash_overrides(record.overrides))
        if pause_at is not None:
            title += f", to update {pause_at}"
        if not is_remote:
            _print_line(title)
        code = self._run_process(record, is_remote=is_remote)
        if is_remote:
            outcome = f"exit code {code}"
            if code:
                outcome += f", see {record.folder}.log"
            _print_line(f"{title}: {outcome}")

    def make_record(self, swept: Sequence[str]) -> JobRecord:
        """Return the record of a run that has not been started.

        Args:
            swept: its overrides in addition to the fixed ones.
        """
        overrides = [*self.fixed, *swept]
        folder = f"{self.folder}/{hash_overrides(overrides)}"
        return JobRecord(self.sweep, overrides, split_words(swept), folder)

    def _is_orphan(self) -> bool:
        host, pid, started = self.launcher
        # With its start time: the pid of a killed launcher may belong to another process by now.
        return (
            host == socket.gethostname() and started is not None and process_start(pid) != started
        )

    def _run_process(self, record: JobRecord, *, is_remote: bool) -> int:
        # Another process may take the folder between the wait and the start: then wait once more.
        while True:
            self._wait_for_owner(record)
            if number := self.stop.signal_number():
                return 128 + number
            code = self._start_process(record, is_remote=is_remote)
            was_faster = code == FolderInUseError.exit_code and _find_owner(record)
            if not was_faster or self.stop.signal_number():
                break
        now = _read_record(Path(f"{record.folder}.json"))
        if now is None or now.sweep == self.sweep:  # else another call of `sweep` has taken over
            replace(now or record, exit_code=code).write(self.folder)
        return code

    def _wait_for_owner(self, record: JobRecord) -> None:
        """Wait for a process that still runs in the folder, left behind by a killed sweep."""
        if (owner := _find_owner(record)) is not None:
            _print_line(
                f"{record.folder} is in use by process {owner.pid}, perhaps of a sweep that was "
                "killed; waiting for it"
            )
        while _find_owner(record) is not None and not self.stop.signal_number():
            time.sleep(POLL_SECONDS)

    def _start_process(self, record: JobRecord, *, is_remote: bool) -> int:
        words = [*self.command, *record.overrides]
        pause_at = self.pauses.get(hash_overrides(record.overrides))
        if pause_at is not None:
            words.append(f"RUN.pause_at={pause_at}")
        words.append(f"RUN.dir={quote_value(record.folder)}")
        log = None
        environment = os.environ | {IN_SWEEP: self.sweep}
        if is_remote:  # parallel runs would mix their lines on the terminal
            environment = dict(os.environ)
            log = Path(f"{record.folder}.log")
        with _open_output(log) as output, handle_signals(self._forward_signal):
            # A process per run: an exhausted memory or a crash in C costs one run, and each one has
            # fresh random states, threads and CUDA contexts, as if it were started alone.
            process = start_process(words, environment, output=output)
            record = replace(record, pid=process.pid, host=socket.gethostname())
            record.write(self.folder)
            # A signal between the last look and the record was not forwarded to this process.
            if number := self.stop.signal_number():
                process.send_signal(number)
            code = process.wait()
        return convert_exit_code(code)

    def _forward_signal(self, number: int, _frame: FrameType | None) -> None:
        self.stop.send(number)


@contextmanager
def _open_output(path: Path | None) -> Iterator[IO[bytes] | None]:
    if path is None:
        yield None
        return
    with path.open("ab") as file:  # appended: a resumed run keeps the output of its first attempt
        yield file


def _identify_process() -> tuple[str, int, int | None]:
    return socket.gethostname(), os.getpid(), process_start(os.getpid())


def _find_owner(record: JobRecord) -> Owner | None:
    """Return the process of this machine that runs in the folder of a run."""
    return find_owner(record.folder, open_storage(record.folder))


def _print_line(line: str) -> None:
    stream = LastingStream(sys.stdout)  # the terminal may have been closed
    stream.write(f"{line}\n")
    stream.flush()
