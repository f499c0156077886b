"""Child processes: signals that are passed on to them, their end with this process, their exit
codes, their memory, and the environment of ranks."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from phasetrain.runtime.signals import is_in_foreground, stop_signals

COMMAND = (sys.executable, "-m", "phasetrain")
"""Starts phasetrain in a new process."""

HEARTBEATS = "PHASETRAIN_HEARTBEATS"
"""Environment variable of a supervised process: the folder for its heartbeat."""

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal to receive when the parent dies."""


PROC = Path("/proc")


class SignalReceiver(Protocol):
    """A process to which signals are passed on, such as a `subprocess.Popen`."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies.

    For torchrun, which cannot stop its workers when it is killed, and as `preexec_fn`, because a
    child does not inherit the setting over the fork. Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def convert_exit_code(code: int) -> int:
    """Return the exit code that a shell reports for a process: 128 + n, where `Popen` has -n, for a
    process that signal n has killed."""
    if code < 0:
        return 128 - code
    return code


def send_signal(processes: Sequence[SignalReceiver], number: int) -> None:
    """Send a signal to the processes that have not ended."""
    for process in processes:
        # It may end between Popen's look at it and the signal.
        with suppress(ProcessLookupError):
            process.send_signal(number)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], further: Sequence[signal.Signals] = ()
) -> Iterator[None]:
    """Call a handler on the signals that stop a run; Python delivers them to the main thread
    only.

    Args:
        handler: as for `signal.signal`.
        further: other signals to handle.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (*stop_signals(), *further)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def forward_signals(
    processes: Sequence[SignalReceiver],
    further: Sequence[signal.Signals] = (),
    *,
    is_apart: bool = False,
) -> Iterator[list[int]]:
    """Pass the signals that stop a run on to child processes; yield the numbers of those received.

    Args:
        processes: the processes; more may be added during the context.
        further: other signals to pass on.
        is_apart: whether the processes are a separate process group.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # The terminal has sent Ctrl-C to every process of the foreground group.
        if number != signal.SIGINT or is_apart or not is_in_foreground():
            send_signal(processes, number)

    with handle_signals(forward, further):
        yield received


def make_rank_environment(
    inherited: Mapping[str, str],
    *,
    rank: int,
    size: int,
    local_rank: int,
    nodes: int,
    address: str,
    port: int,
) -> dict[str, str]:
    """Return the environment of a rank, with the variables that torchrun would set.

    Args:
        inherited: environment of the launching process.
        rank: rank of the process.
        size: world size.
        local_rank: rank of the process on its machine.
        nodes: number of machines.
        address: host at which the ranks meet.
        port: port at which they meet.
    """
    return {
        # As torchrun does: otherwise every rank would start a thread for each core.
        "OMP_NUM_THREADS": "1",
        **inherited,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the resident set sizes of processes; a process that has ended counts as 0.

    Pages that processes share, such as those after a fork, count once per process.
    """
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        try:
            total += int((PROC / str(pid) / "statm").read_text("ascii").split()[1]) * page
        except (OSError, ValueError, IndexError):
            continue
    return total
