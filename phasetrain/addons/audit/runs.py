"""Runs the audited command, each time in a separate folder, with the probe in its processes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phasetrain.addons.audit.probe import FOLDER, LEADER, OPTIONS
from phasetrain.addons.audit.trace import Ranks, Save, Trace, read_traces

SITE = Path(__file__).parent / "site"

RUN = "{run}"
"""Word of a command that stands for the folder of the run."""

LARGE = 16 << 20
"""Files of at least this many bytes are linked, not copied."""

MANY = 20_000
"""Maximum number of files of a working folder that is copied."""

SKIPPED = shutil.ignore_patterns(
    ".git", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache"
)

TAIL = 12
"""Lines of the output that an error shows."""

LAUNCHER_ERROR = re.compile(r"Sending process \d+ closing signal|failed \(exitcode: ")
"""In the first line that torchrun prints about a process that has failed."""

RANK_PREFIX = re.compile(r"^\[(rank\d+)\]:[ ]?")
"""Beginning of a line of a traceback in a process group."""


class CannotAuditError(Exception):
    """The command cannot be audited; the message says why."""


@dataclass(frozen=True)
class Finished:
    """One run of the command.

    Attributes:
        exit_code: as a shell reports it; negative if a signal ended it.
        traces: records of its processes that made updates, by rank.
        output: its last lines.
        folder: its working folder, or what stood for `{run}`.
    """

    exit_code: int
    traces: Sequence[Trace]
    output: str
    folder: Path

    @property
    def trace(self) -> Trace:
        """The record of the first rank."""
        return self.traces[0] if self.traces else Trace()

    @property
    def ranks(self) -> Ranks:
        """The records by rank; of several processes of a rank, that with the most updates."""
        ranks: dict[str, Trace] = {}
        for trace in self.traces:
            ranks.setdefault(trace.rank, trace)
        return ranks

    @property
    def saves(self) -> Sequence[Save]:
        """Checkpoints that any rank has written."""
        return [save for trace in self.ranks.values() for save in trace.saves]

    @property
    def files(self) -> Sequence[tuple[int, str]]:
        """Files of any rank that may be checkpoints, the newest last, of equal ones that of the
        first rank."""
        files = [file for trace in reversed([*self.ranks.values()]) for file in trace.files]
        return sorted(files, key=lambda file: file[0])


class Runner:
    """Runs a command in separate folders.

    Args:
        command: words; `{run}` in them stands for a new folder per run. Without it each run gets a
            copy of the working folder.
        scratch: folder for all of it.
        timeout: seconds until a run is ended.
    """

    def __init__(self, command: Sequence[str], scratch: Path, timeout: float) -> None:
        self.command = tuple(command)
        self.scratch = scratch
        self.temporary = scratch / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.timeout = timeout
        self.names_folder = any(RUN in word for word in command)
        self.count = 0
        if not self.names_folder:
            _check_size(Path.cwd())

    def new_folder(self, name: str, like: Path | None = None) -> Path:
        """Return a new folder for a run: as it was before the first one, or like another one."""
        folder = self.scratch / name
        source = like or (None if self.names_folder else Path.cwd())
        if source is None:
            folder.mkdir()
        else:
            shutil.copytree(
                source,
                folder,
                ignore=self._list_skipped,
                copy_function=_copy_or_link,
                symlinks=True,
            )
        return folder

    def _list_skipped(self, folder: str, names: list[str]) -> set[str]:
        # TMPDIR may be in the working folder, which would then be copied into itself.
        own = {name for name in names if Path(folder, name) == self.scratch}
        return own | SKIPPED(folder, names)

    def run(
        self, folder: Path, options: Mapping[str, int], command: Sequence[str] | None = None
    ) -> Finished:
        """Run the command, or another one, and return how it ended.

        Raises:
            CannotAuditError: it cannot be started, or does not end.
        """
        self.count += 1
        records = self.scratch / f"records-{self.count}"
        records.mkdir()
        words = [word.replace(RUN, str(folder)) for word in command or self.command]
        words[0] = _find_program(words[0], folder)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        # What a killed process leaves there, such as the sockets of workers, is removed as well.
        environment["TMPDIR"] = str(self.temporary)
        environment[FOLDER] = str(records)
        environment[OPTIONS] = json.dumps(dict(options))
        # The probe gets into new processes only, not into forks of a warm parent.
        environment["PHASETRAIN_WARM_START"] = "0"
        # As a terminal would not: output of a killed process would be lost in its buffer.
        environment.setdefault("PYTHONUNBUFFERED", "1")
        if self.names_folder:  # it runs in the user's folder, where nothing is left
            environment.setdefault("PYTHONDONTWRITEBYTECODE", "1")
        cwd = Path.cwd() if self.names_folder else folder
        with tempfile.TemporaryFile() as output:
            try:
                exit_code = _wait(words, environment, cwd, output, self.timeout)
            finally:
                _kill_others(str(records))
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        traces = read_traces(records)
        failures = [trace.failure for trace in traces if trace.failure]
        if failures:
            raise CannotAuditError(f"the script could not be recorded: {failures[0]}")
        return Finished(exit_code, traces, "\n".join(_find_error(lines)[-TAIL:]), folder)


def _wait(
    words: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    output: IO[bytes],
    timeout: float,
) -> int:
    try:
        process = subprocess.Popen(
            words,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise CannotAuditError(
            f"{shlex.join(words)} cannot be started: {error}. It runs in {cwd}, a copy of the "
            "working folder unless {run} is in the command: give paths to what is not in it, such "
            "as interpreters, from the root on"
        ) from None
    try:
        Path(environment[FOLDER], LEADER).write_text(str(process.pid))
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise CannotAuditError(
            f"{shlex.join(words)} did not end within {timeout:g} seconds; --updates N ends it "
            "after N updates, --timeout SECONDS waits longer"
        ) from None
    finally:
        # Workers and helpers of a killed process as well.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _find_program(program: str, folder: Path) -> str:
    """Return the path of a program that is not in a copy of the working folder, such as
    `../bin/python` or `.venv/bin/python`."""
    is_relative = os.sep in program and not Path(program).is_absolute()
    if is_relative and not (folder / program).exists() and Path(program).exists():
        return os.path.abspath(program)  # noqa: PTH100 - a link of a virtual environment stays
    return program


def _kill_others(records: str) -> None:
    """Kill processes that the command has started in other sessions, such as torchrun's ranks."""
    mark = os.fsencode(f"{FOLDER}={records}")
    end = time.monotonic() + 10.0
    while time.monotonic() < end and _kill_marked(mark):
        time.sleep(0.05)  # until they have ended: the next run must not meet them


def _kill_marked(mark: bytes) -> int:
    """Kill processes with a variable in their environment, and return how many there were."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # ended, or another user's
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)
                count += 1
    return count


def _find_error(lines: Sequence[str]) -> Sequence[str]:
    """Return lines of output without torchrun's report of an error, and without the errors of
    other ranks than the first one that fails, which may follow from it."""
    ends = [number for number, line in enumerate(lines) if LAUNCHER_ERROR.search(line)]
    kept, first = [], ""
    for line in lines[: ends[0]] if ends else lines:
        prefix = RANK_PREFIX.match(line)
        rank = prefix.group(1) if prefix else ""
        first = first or rank
        if rank in ("", first):
            kept.append(RANK_PREFIX.sub("", line))
    return kept if any(line.strip() for line in kept) else lines


def _copy_or_link(source: str, target: str) -> None:
    if os.path.getsize(source) >= LARGE:  # noqa: PTH202
        os.symlink(os.path.abspath(source), target)  # noqa: PTH100, PTH211
    else:
        shutil.copy2(source, target)


def _check_size(folder: Path) -> None:
    count = 0
    for _, folders, files in os.walk(folder):
        folders[:] = set(folders) - SKIPPED(str(folder), folders)
        count += len(files)
        if count > MANY:
            raise CannotAuditError(
                f"{folder} has more than {MANY:,} files, and each run of the audit gets a copy of "
                f"it. Write {RUN} in the command where the script takes the folder that it writes "
                f"to, such as `--output {RUN}`; the audit then runs in the working folder itself"
            )
