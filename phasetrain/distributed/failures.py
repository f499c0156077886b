"""Who failed first: the error of one process is what all of them end with."""

import json
import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phasetrain.errors import PeerError, PhasetrainError

FIRST = "failed"
"""Key of the first failure in the store."""

PATIENCE_SECONDS = 2.0
"""How long a process whose peer has gone waits to hear why."""

LOOK_SECONDS = 0.05

_LOST = re.compile(
    r"gloo|nccl|tcpstore|connection (closed|reset|refused)|broken pipe|timed out waiting|recvvector failed"
    r"|connection was likely closed|process group",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an error only says that another process is gone or does not answer."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, PhasetrainError) and bool(_LOST.search(str(error)))


class Failures:
    """The board on which the first process that fails writes why.

    Args:
        store: that of the process group.
        rank, size: number of this process, and of all.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        store.set(f"process/{rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def cause(self, error: BaseException) -> BaseException:
        """Return what this process ends with: its own error, of which others then hear, or that of the first to fail.

        A process that has only lost another one waits a moment to hear why.
        """
        if isinstance(error, PeerError):
            return error
        if lost := _lost_in(error):
            return self._first() or self._gone(lost)
        code = error.exit_code if isinstance(error, PhasetrainError) else _code(error)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        with suppress(RuntimeError, dist.DistError):
            self._store.compare_set(FIRST, "", json.dumps([self._rank, code, text[:4000]]))
        return error

    def _first(self) -> PeerError | None:
        end = time.monotonic() + PATIENCE_SECONDS
        with suppress(RuntimeError, dist.DistError):
            while not self._store.check([FIRST]):
                if time.monotonic() > end:
                    return None
                time.sleep(LOOK_SECONDS)
            rank, code, text = json.loads(self._store.get(FIRST))
            return PeerError(f"process {rank} of {self._size} failed first: {text}", code)
        return None

    def _gone(self, error: BaseException) -> PeerError:
        for rank in range(self._size):
            if rank != self._rank and (who := self._dead(rank)):
                return PeerError(
                    f"process {rank} of {self._size} ({who}) is gone without a word: killed, or crashed", 1
                )
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return PeerError(
            f"another process of the {self._size} is gone or has not answered within DISTRIBUTED.timeout_seconds "
            f"({first}); look at its own log, and into stacks.txt",
            1,
        )

    def _dead(self, rank: int) -> str:
        """Return host and pid of a process of this machine that is no longer alive."""
        with suppress(RuntimeError, dist.DistError, OSError, ValueError):
            self._store.set_timeout(timedelta(seconds=1))
            host, pid = json.loads(self._store.get(f"process/{rank}"))
            if host == socket.gethostname() and not _alive(pid):
                return f"pid {pid} on {host}"
        return ""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _lost_in(error: BaseException) -> BaseException | None:
    """Return the error, or one that it came from, that tells of a lost process."""
    while not is_lost_peer(error):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return error


def _code(error: BaseException) -> int:
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
