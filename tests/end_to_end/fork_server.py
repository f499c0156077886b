"""A server that forks runs: it imports torch once (seconds), and each process of a run is a fork
(tenths of a second).

Each fork leads its own session and runs the command line. If gcc is installed, a shared library is
loaded before the C library (LD_PRELOAD), so that system calls can be made to fail.
"""

import contextlib
import ctypes
import gc
import io
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from failing_calls import compile_library

HERE = Path(__file__).parent
MS_PRIVATE_RECURSIVE = 0x44000
CLONE_NEWNS = 0x20000


class ForkServer:
    """Starts the server; leaving the context ends it. The server handles one run at a time.

    Attributes:
        faults: whether system calls can be made to fail on this machine.
    """

    def __init__(self, folder: Path) -> None:
        library = compile_library(folder)
        self.faults = library is not None
        # The folders of `pythonpath` in pyproject.toml have the parts that tests use.
        parts = [path for path in sys.path if Path(path).is_relative_to(HERE.parent)]
        paths = os.pathsep.join([*parts, os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        environment |= {"LD_PRELOAD": str(library)} if library else {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder / "warm")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def fork(self, orders: list[dict[str, Any]]) -> list[int]:
        """Fork a process for each order and return their ids.

        An order holds the command-line arguments `words`, the file `output` for stdout and stderr,
        the working directory `cwd`, `environment` and `faults`; `apply` lists the optional keys.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()
        pids: list[int] = json.loads(self._answer())
        return pids

    def next_end(self) -> tuple[int, int, float]:
        """Wait for the next process to end; return its index, exit code and end time."""
        index, code, at = json.loads(self._answer())
        return index, code, at

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program that forks runs has ended"
        return line


def apply(order: dict[str, Any]) -> None:
    """Set up the faults of an order in the current process.

    Optional keys of an order: `uid`, the user id; `shared_memory`, the size of a private /dev/shm.
    """
    for fault in order["faults"]:
        text = (fault["call"].encode(), fault["path"].encode())
        numbers = (fault["number"], fault["first"], fault["last"], fault["milliseconds"])
        ctypes.CDLL(None).fault_add(*text, *numbers)
    os.chdir(order["cwd"])
    if "shared_memory" in order:
        mount_shared_memory(order["shared_memory"])
    if "uid" in order:
        os.setgid(order["uid"])
        os.setuid(order["uid"])


def mount_shared_memory(size: str) -> None:
    """Mount a small /dev/shm that only this process and its children see.

    Raises:
        PermissionError: the user is not allowed to mount.
    """
    library = ctypes.CDLL(None, use_errno=True)
    done = library.unshare(CLONE_NEWNS)
    # Otherwise the mount would be seen by all other processes too.
    done = done or library.mount(b"none", b"/", None, MS_PRIVATE_RECURSIVE, None)
    done = done or library.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode())
    if done:
        raise PermissionError(ctypes.get_errno(), "this user may not mount a small /dev/shm")


def run_order(order: dict[str, Any]) -> int:
    """Run the command line and return its exit code."""
    from phasetrain.cli import main

    try:
        os.setsid()
        sys.stdin.close()
        output = os.open(
            order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o666
        )
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
        sys.path[:0] = order.get("path", [order["cwd"]])
        apply(order)
        code = main(order["words"])
        if "shared_memory" in order:  # only a process of this mount namespace can see it
            left = [path.name for path in Path("/dev/shm").iterdir()]
            print(f"left in /dev/shm: {left}")  # noqa: T201 - the output of the run
        return code
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - a fork must not continue with the code of its parent
        traceback.print_exc()
        return 1


def meet_early() -> None:
    """Connect to the rendezvous store as soon as it listens; torch's client waits long before it
    retries."""
    from phasetrain.distributed import group

    store = group.TCPStore

    def met(address: str, port: int, *args: Any, is_master: bool, **options: Any) -> Any:
        end = time.monotonic() + 2.0
        while not is_master and not listens(port) and time.monotonic() < end:
            time.sleep(0.005)
        return store(address, port, *args, is_master=is_master, **options)

    group.TCPStore = met


def listens(port: int) -> bool:
    """Return whether a local port is listening; True if the kernel has no table of sockets."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()]
    return not tables or any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def wait_for_threads() -> None:
    """Wait until this process has one thread: a lock held by another thread during a fork stays
    locked in the child."""
    end = time.monotonic() + 10.0
    while len(list(Path("/proc/self/task").iterdir())) > 1:
        assert time.monotonic() < end, "a thread has stayed; a fork might hang"
        time.sleep(0.001)


def warm_up(folder: str) -> None:
    """Run the command line without a step, to import the modules that are imported lazily."""
    import torch
    from caches import keep_results

    from phasetrain.cli import main

    keep_results()

    torch.set_num_threads(1)  # a pool of threads would not live on in a fork
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([f"RUN.dir={folder}", "PHASES.epochs=0"]) == 0
    gc.freeze()  # a garbage collection in a fork would copy the pages of all imported modules


def serve(folder: str) -> None:
    """Read lists of orders from stdin, fork a process for each order, and print ids and ends."""
    from operators import declared_operators

    operators = declared_operators()  # operators live as long as the library object
    assert operators is None or operators.ns == "torchvision"
    warm_up(folder)
    for line in sys.stdin:
        wait_for_threads()
        indices = {}
        for index, order in enumerate(json.loads(line)):
            if (pid := os.fork()) == 0:
                os.environ.update(order["environment"])
                meet_early()
                os._exit(run_order(order) & 0xFF)
            indices[pid] = index
        print(json.dumps(list(indices)), flush=True)  # noqa: T201 - the answer
        for _ in range(len(indices)):
            pid, status = os.wait()
            ended = [indices[pid], os.waitstatus_to_exitcode(status), time.monotonic()]
            print(json.dumps(ended), flush=True)  # noqa: T201 - the answer
    os._exit(0)  # an ordinary exit takes torch seconds


if __name__ == "__main__":
    serve(sys.argv[1])
