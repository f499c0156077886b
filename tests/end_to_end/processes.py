"""Starts runs of several processes that meet over gloo on this machine, as a launcher would.

A program of its own too, started once for a session of tests: it imports torch once (seconds), and
each process of a run is a fork of it (tenths of a second) in a session of its own that does what
the command line does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from faulty import GONE_SECONDS, HERE, Fault, obey, wait_for_threads
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
    """Starts runs, one at a time; a context that ends with its program."""

    def __init__(self, folder: Path) -> None:
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=folder,
        )

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

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
            faults: number of a process -> system call that fails there; needs the library of
                `faulty` in LD_PRELOAD.
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
        assert self._process.stdin is not None
        self._began = time.monotonic()
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()
        self._pids: list[int] = json.loads(self._answer())
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
            rank, code, at = json.loads(self._answer())
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

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program that starts runs has ended"
        return line


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def meet_early() -> None:
    """Let this process look for the store of the others once it is there: torch's client comes
    again after long."""
    from phasetrain.distributed import group

    store = group.TCPStore

    def met(address: str, port: int, *args: Any, is_master: bool, **options: Any) -> Any:
        end = time.monotonic() + 2.0
        while not is_master and not listens(port) and time.monotonic() < end:
            time.sleep(0.005)
        return store(address, port, *args, is_master=is_master, **options)

    group.TCPStore = met


def listens(port: int) -> bool:
    """Tell whether anybody listens on a port of this machine; True where the kernel does not
    tell."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()]
    return not tables or any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def serve() -> None:
    """Fork the processes of a run for each list of orders that comes in, and tell their ids and
    their ends."""
    import torch
    import torch._dynamo  # which the first optimizer imports
    from operators import declared_operators

    import phasetrain.commands.engines
    from phasetrain.config.compose.composed import compose
    from phasetrain.config.schema import default_schema

    compose([], config_dir=None, schema=default_schema())  # Hydra is slow the first time
    torch.set_num_threads(1)  # a pool of threads would not live on in a fork
    operators = declared_operators()  # they live as long as this
    assert phasetrain.run
    assert operators is None or operators.ns == "torchvision"
    for line in sys.stdin:
        if "strategy=fsdp" in line:  # a second or two, once
            import torch.distributed.checkpoint
            import torch.distributed.fsdp
        if "strategy=zero" in line:
            import torch.distributed.optim
        wait_for_threads()
        ranks = {}
        for rank, order in enumerate(json.loads(line)):
            if (pid := os.fork()) == 0:
                os.environ.update(order["environment"])
                meet_early()
                os._exit(obey(order) & 0xFF)
            ranks[pid] = rank
        print(json.dumps(list(ranks)), flush=True)  # noqa: T201 - the answer
        for _ in range(len(ranks)):
            pid, status = os.wait()
            ended = [ranks[pid], os.waitstatus_to_exitcode(status), time.monotonic()]
            print(json.dumps(ended), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    serve()
