"""Starts runs with faults from outside (failing system calls, limits, other users) and reports
what they leave behind."""

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from failing_calls import Fault
from fork_server import ForkServer
from kill_findings import session

ONE = "MACHINE.threads=1"
"""Override for small runs: a second thread is not faster, and the bits depend on the number of
threads."""
GONE_SECONDS = 15.0
"""Maximum time for a process to end after its main process: loader workers check every 5 s whether
it is alive."""


@dataclass(frozen=True)
class Ended:
    """The result of a run.

    Attributes:
        code: exit code; the negative signal number if a signal ended the process.
        output: stdout and stderr.
        alive: processes of its session that were still alive.
        segments: files that its processes left in /dev/shm.
        seconds: wall time.
    """

    code: int
    output: str
    alive: list[int] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Starter:
    """Starts runs on a `ForkServer`, one at a time.

    Attributes:
        faults: whether system calls can be made to fail on this machine.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.faults = server.faults

    def run(
        self, folder: Path, *words: str, faults: tuple[Fault, ...] = (), **options: Any
    ) -> Ended:
        """Run the command line with RUN.dir=`folder` and wait for its end.

        Args:
            faults: system calls that fail.
            options: `uid`, the user id; `cwd`, the working directory; `path`, folders prepended to
                `sys.path`, by default the working directory, as with `python -m`;
                `shared_memory`, the size of a private /dev/shm.
        """
        self.start(folder, *words, faults=faults, **options)
        return self.wait()

    def start(
        self, folder: Path, *words: str, faults: tuple[Fault, ...] = (), **options: Any
    ) -> int:
        """Start the command line and return the id of its process, which leads its own session."""
        self._output = folder.with_name(folder.name + ".txt")
        self._before, self._began = shared_memory(), time.monotonic()
        order = {
            "words": [f"RUN.dir={folder}", *words],
            "output": str(self._output),
            "cwd": str(folder.parent),
            "faults": [asdict(fault) | {"number": fault.number} for fault in faults],
            "environment": {},
        }
        (self._pid,) = self._server.fork([order | options])
        return self._pid

    def wait(self) -> Ended:
        """Wait until the run and all processes of its session have ended."""
        _, code, at = self._server.next_end()
        end = time.monotonic() + GONE_SECONDS
        while (alive := session(self._pid)) and time.monotonic() < end:
            time.sleep(0.02)
        for one in alive:
            os.kill(one, signal.SIGKILL)
        segments = [name for name in shared_memory() - self._before if str(self._pid) in name]
        output = self._output.read_text(errors="replace")
        return Ended(code, output, alive, segments, at - self._began)


def shared_memory() -> set[str]:
    """Return the names of all segments of shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir()}


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "2m") -> Iterator[Path]:
    """Mount a file system in memory with the given size at `folder`.

    Raises:
        PermissionError: the user is not allowed to mount.
    """
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a temporary folder that other users can enter, unlike the folders of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def limit_files(size: int) -> None:
    """Limit the size of files that this process writes, in bytes; -1 for no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
