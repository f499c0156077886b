"""Starts runs with several ranks over gloo on this machine, as a launcher would."""

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
    """The result of a run with several ranks.

    Attributes:
        codes: exit code of each rank; the negative signal number if a signal ended the process.
        outputs: stdout and stderr of each rank.
        seconds: wall time until the last rank had ended.
        ends: seconds until each rank had ended.
        alive: processes of their sessions that were still alive.
    """

    codes: list[int]
    outputs: list[str]
    seconds: float
    ends: list[float]
    alive: list[int] = field(default_factory=list)


class Launcher:
    """Starts runs on a `ForkServer`, one at a time.

    Attributes:
        faults: whether system calls can be made to fail on this machine.
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
        """Run the command line with RUN.dir=`folder` on `size` ranks and wait for the end."""
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
        """Start a run and return the ids of its processes; each of them leads its own session.

        Args:
            faults: rank -> system call that fails there.
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
        """Return the output of a rank up to now."""
        return (
            self._outputs[rank].read_text(errors="replace") if self._outputs[rank].exists() else ""
        )

    def wait(self, limit: float = 120.0) -> Finished:
        """Wait until all ranks and the processes of their sessions have ended; kill them after
        `limit` seconds."""
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
    """Return an unused port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
