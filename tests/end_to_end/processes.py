"""Starts runs of several processes that meet over gloo on this machine, as a launcher would."""

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from failing_calls import Fault
from faulty import GONE_SECONDS
from fork_server import ForkServer
from kill_findings import session

NO_FAULTS: Mapping[int, Fault] = MappingProxyType({})


@dataclass(frozen=True)
class Finished:
    """What came of a run.

    Attributes:
        codes: exit code of each process; the negative number of the signal where the kernel ended
            it.
        outputs: what each printed.
        seconds: wall time until the last one had ended.
        ends: seconds after which each had ended.
        alive: processes of their sessions that lived on.
    """

    codes: list[int]
    outputs: list[str]
    seconds: float
    ends: list[float]
    alive: list[int] = field(default_factory=list)


class Launcher:
    """Starts runs on a `ForkServer`, one at a time.

    Attributes:
        faults: whether system calls can be made to fail here.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.faults = server.faults

    def run(
        self,
        folder: Path,
        size: int,
        *words: str,
        limit: float = 120.0,
        faults: Mapping[int, Fault] = NO_FAULTS,
        **environment: str,
    ) -> Finished:
        """Run the command line with RUN.dir=`folder` on `size` processes to its end."""
        self.start(folder, size, *words, faults=faults, **environment)
        return self.wait(limit)

    def start(
        self,
        folder: Path,
        size: int,
        *words: str,
        faults: Mapping[int, Fault] = NO_FAULTS,
        **environment: str,
    ) -> list[int]:
        """Start it and return the ids of the processes, each of which leads a session of its own.

        Args:
            faults: number of a process -> system call that fails there.
        """
        self._outputs = [folder.with_name(f"{folder.name}-{rank}.txt") for rank in range(size)]
        shared = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        orders = [
            {
                "words": [f"RUN.dir={folder}", *words],
                "output": str(output),
                "cwd": str(folder.parent),
                "faults": [asdict(faults[rank]) | {"number": faults[rank].number}]
                if rank in faults
                else [],
                "environment": shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment,
            }
            for rank, output in enumerate(self._outputs)
        ]
        self._began = time.monotonic()
        self._pids = self._server.fork(orders)
        return self._pids

    def output(self, rank: int) -> str:
        """Return what a process has printed so far."""
        return (
            self._outputs[rank].read_text(errors="replace") if self._outputs[rank].exists() else ""
        )

    def wait(self, limit: float = 120.0) -> Finished:
        """Wait until all processes have ended, and their sessions with them; after `limit` seconds
        they are killed."""
        size = len(self._pids)
        codes, ends = [0] * size, [0.0] * size
        watch = threading.Timer(limit, self._kill)
        watch.start()
        for _ in range(size):
            rank, code, at = self._server.next_end()
            codes[rank], ends[rank] = code, at - self._began
        watch.cancel()
        watch.join()
        seconds, end = time.monotonic() - self._began, time.monotonic() + GONE_SECONDS
        while (
            alive := [one for pid in self._pids for one in session(pid)]
        ) and time.monotonic() < end:
            time.sleep(0.02)
        for one in alive:
            os.kill(one, signal.SIGKILL)
        return Finished(codes, [self.output(rank) for rank in range(size)], seconds, ends, alive)

    def _kill(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
