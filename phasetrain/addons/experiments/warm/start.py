"""Starts the processes of many small runs: as forks of a warm parent, or as new processes.

Most of a small run is the import of torch. The warm parent (`parent.py`) imports it once, and forks
a child per run. It is used for `python -m phasetrain` alone, and only on Linux without a GPU; in
all other cases, and whenever the parent is not as clean as a new process, the run is a new process.

A parent serves only runs with its own environment and working folder, because libraries read
variables such as OMP_NUM_THREADS when they are imported, and no list of these would be complete.
"""

import atexit
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

from phasetrain.runs.records import process_exists
from phasetrain.runtime.child_processes import COMMAND, stop_with_parent

log = logging.getLogger(__name__)

SWITCH = "PHASETRAIN_WARM_START"
"""Environment variable; with 0 each run is a new process."""

PARENT = "phasetrain.addons.experiments.warm.parent"

GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices of drivers of NVIDIA, of NVIDIA below Windows, and of AMD. They are not opened, because a
process that has used CUDA must not fork."""

POLL_SECONDS = 0.02
"""Interval of polling a run whose parent has died."""


class Process(Protocol):
    """What the commands use of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Its id."""

    def send_signal(self, sig: int) -> None:
        """Send a signal unless it has ended."""

    def wait(self) -> int:
        """Return its exit code once it has ended; -n if signal n has killed it."""


class WarmProcess:
    """A run that a warm parent has forked.

    Args:
        pid: its id.
        answers: pipe in which the parent reports its end.
    """

    def __init__(self, pid: int, answers: FileIO) -> None:
        self.pid = pid
        self._answers = answers
        self._code: int | None = None

    def send_signal(self, sig: int) -> None:
        """Send a signal unless the run has ended."""
        if self._code is None and not select.select([self._answers], [], [], 0)[0]:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def wait(self) -> int:
        """Return the exit code once the run has ended; -n if signal n has killed it."""
        if self._code is None:
            code = _read_answer(self._answers).get("code")
            self._answers.close()
            if code is None:
                # The parent was killed. The kernel has then sent SIGTERM to the run, which saves.
                while process_exists(self.pid):
                    time.sleep(POLL_SECONDS)
                code = -signal.SIGTERM
            self._code = code
        return self._code


class WarmParent:
    """The warm parent of an environment and a working folder, started when it is needed.

    Args:
        environment: its environment.
        folder: its working folder.
    """

    def __init__(self, environment: Mapping[str, str], folder: str) -> None:
        self._environment = environment
        self._folder = folder
        self._lock = Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connection: socket.socket | None = None
        self._refusal = ""
        self._owner = os.getpid()
        atexit.register(self.close)

    def start(self, words: Sequence[str], streams: Sequence[int]) -> WarmProcess | None:
        """Start a run; None if the parent is not as clean as a new process.

        Args:
            words: the module, and its command line.
            streams: descriptors of its standard input, output and error.

        Raises:
            OSError: no process, no pipe, or too long a command line.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        message = json.dumps({"words": list(words), "mask": [int(number) for number in mask]})
        # Once more with a new parent: this one may have ended, or have imported files that have
        # changed since.
        for _ in range(2):
            if self._refusal:
                break
            with ExitStack() as stack:
                reader, writer = os.pipe()
                answers = stack.enter_context(open(reader, "rb", buffering=0))
                with open(writer, "wb", buffering=0), self._lock:
                    connection = self._connect()
                    with suppress(BrokenPipeError, ConnectionResetError):
                        socket.send_fds(connection, [message.encode()], [*streams, writer])
                answer = _read_answer(answers)
                if "pid" in answer:
                    stack.pop_all()  # WarmProcess closes the pipe
                    return WarmProcess(answer["pid"], answers)
            self._refusal = answer.get("refusal", "")
            self._disconnect(connection)
        log.debug("no warm start: %s", self._refusal or "the parent has ended")
        return None

    def close(self) -> None:
        """Kill the parent; the runs that it has started get SIGTERM."""
        # A fork of this process may exit as well.
        for process in self._processes if os.getpid() == self._owner else ():
            process.kill()
            process.wait()

    def _disconnect(self, connection: socket.socket) -> None:
        """Start no more runs from a parent; it ends after the last run that it has started."""
        with self._lock:
            connection.close()
            if self._connection is connection:
                self._connection = None
            self._processes = [process for process in self._processes if process.poll() is None]

    def _connect(self) -> socket.socket:
        """Return the connection to the parent, which is started if there is none."""
        if self._connection is not None:
            return self._connection
        # Messages arrive whole, with the descriptors that belong to them.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # It is in the process group of the command, as the runs are, and must not end by Ctrl-C
        # before they do. The kernel keeps the mask over fork and exec.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", PARENT, str(theirs.fileno()), str(os.getpid())],
                    env=self._environment,
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:  # also Ctrl-C: the socket has no owner yet that would close it
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        self._connection = ours
        return ours


def _read_answer(answers: FileIO) -> dict[str, Any]:
    """Return the next answer of a parent; it is empty if the parent has ended."""
    answer: dict[str, Any] = json.loads(answers.readline() or b"{}")
    return answer


@cache
def find_parent(
    environment: tuple[tuple[str, str], ...], folder: str, group: str, client: int
) -> WarmParent:
    """Return the warm parent of this process for runs of one environment, folder and group.

    Args:
        environment: environment of the runs.
        folder: their working folder.
        group: runs of different groups have different parents.
        client: id of this process; a fork of it has other parents.
    """
    return WarmParent(dict(environment), folder)


def can_start_warm(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command may be run in a fork of a warm parent."""
    return (
        sys.platform == "linux"
        and tuple(command[: len(COMMAND)]) == COMMAND
        and environment.get(SWITCH) != "0"
        and not any(Path(device).exists() for device in GPUS)
    )


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    cwd: str | None = None,
    stdin: int | None = None,
    output: IO[bytes] | None = None,
    group: str = "",
) -> Process:
    """Start a run as a fork of a warm parent if that is possible, else as a new process.

    In both cases the kernel sends SIGTERM to the run if the command that has started it dies.

    Args:
        command: the command line.
        environment: its environment.
        cwd: its working folder; None for the folder of this process.
        stdin: None to inherit it, or `subprocess.DEVNULL`.
        output: file for standard output and error; None to inherit them.
        group: runs of different groups are forked from different parents, and so have different
            seeds of Python's hashes.
    """
    if can_start_warm(command, environment):
        try:
            folder = os.path.abspath(cwd or ".")  # noqa: PTH100 - as the shell, links are kept
            key = (tuple(sorted(environment.items())), folder, group, os.getpid())
            process = _start_warm(find_parent(*key), command, stdin, output)
        except OSError as error:
            log.debug("no warm start: %s", error)
            process = None
        if process is not None:
            return process
    return subprocess.Popen(
        command,
        env=environment,
        cwd=cwd,
        stdin=stdin,
        stdout=output,
        stderr=output,
        preexec_fn=stop_with_parent,
    )


def _start_warm(
    parent: WarmParent, command: Sequence[str], stdin: int | None, output: IO[bytes] | None
) -> WarmProcess | None:
    out, error = (1, 2) if output is None else (output.fileno(),) * 2
    words = command[len(COMMAND) - 1 :]
    if stdin is None:
        return parent.start(words, (0, out, error))
    with open(os.devnull, "rb") as nothing:
        return parent.start(words, (nothing.fileno(), out, error))
