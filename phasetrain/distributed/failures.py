"""Who failed first: the error of one process is what all of them end with."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phasetrain.errors import PeerError, PhasetrainError

FIRST = "failed"
"""Key of the first failure in the store."""

PATIENCE_SECONDS = 1.0
"""How long a process that has lost another one waits to hear why, and who else has."""

HEARD_SECONDS = 0.3
"""How long the main process waits for the others to hear, before its store goes with it."""

ANSWER_SECONDS = 1.0
"""How long the store may take to answer: that of a process which was stopped never does."""

Status = Callable[[], Mapping[str, Any]]
"""Returns the content of status.json, which the main process writes."""

LOOK_SECONDS = 0.05

_DEAD = "ZXx"
_STOPPED = "Tt"
"""Letters of the states of processes, see proc(5)."""

_LOST = re.compile(
    r"gloo|nccl|tcpstore|connection (closed|reset|refused)|broken pipe|timed out waiting|timeout caused pair closure"
    r"|recvvector failed|connection was likely closed|process group",
    re.IGNORECASE,
)
"""What such errors say, where they come from code that talks to other processes."""

_OURS = re.compile(
    r"[/\\](torch[/\\](distributed|autograd|nn[/\\]parallel|_)|fairscale[/\\]|phasetrain[/\\]distributed[/\\])"
)
"""Such code; a backward pass talks to other processes as well."""


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an error only says that another process is gone or does not answer."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    if (
        not isinstance(error, RuntimeError)
        or isinstance(error, PhasetrainError)
        or not _LOST.search(str(error))
    ):
        return False
    return "gloo/transport" in str(error) or bool(_OURS.search(_raised_in(error)))


def _raised_in(error: BaseException) -> str:
    """Return the file in which an error was raised, empty where it was not raised at all."""
    trace = error.__traceback__
    file = ""
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return file


class Failures:
    """The board on which the first process that fails writes why.

    Args:
        store: that of the process group.
        rank, size: number of this process, and of all.
        peers: host and process id of each.
    """

    def __init__(
        self, store: Any, rank: int, size: int, peers: Sequence[tuple[str, int]] = ()
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self.peers = tuple(peers)

    def cause(self, error: BaseException, status: Status = dict) -> BaseException:
        """Return what this process ends with: its own error, of which others then hear, or that of
        the first to fail.

        A process that has only lost another one waits a moment to hear why.

        Args:
            error: of this process.
            status: what the main process has written down of its end; its store ends with it.
        """
        if isinstance(error, PeerError):
            return error
        if lost := _lost_in(error):
            found = self._first(status) or self._gone(lost)
            self._ask(lambda: self._store.set(f"heard/{self._rank}", "1"))
            return found
        code = error.exit_code if isinstance(error, PhasetrainError) else _code(error)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, SystemExit):
            text = f"it ended at once with code {code}" + (
                " (a second signal)" if code > 128 else ""
            )
        self._write(self._rank, code, text[:4000])
        return error

    def wait_until_heard(self) -> None:
        """Wait a moment until all others that live know as well why they end: the store goes with
        this process.

        Those that wait for this process alone notice only when it ends, and then find status.json.
        """
        others = set(range(self._size)) - {self._rank}
        end = time.monotonic() + HEARD_SECONDS
        while (others := others - set(self._local(_DEAD))) and time.monotonic() < end:
            others = {rank for rank in others if not self._ask(partial(self._has, f"heard/{rank}"))}
            time.sleep(LOOK_SECONDS if others else 0.0)

    def _first(self, status: Status) -> PeerError | None:
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            dead = self._local(_DEAD)  # looked for first: whoever fails writes why before it ends
            if found := self._written() or self._noted(status):
                return found
            if dead or time.monotonic() > end:
                return None
            time.sleep(LOOK_SECONDS)

    def _written(self) -> PeerError | None:
        """Return what stands on the board."""
        found = self._ask(lambda: self._store.get(FIRST) if self._store.check([FIRST]) else None)
        if not found:
            return None
        rank, code, text = json.loads(found)
        if rank is None:  # gone without a word, as somebody else has found out
            return PeerError(text, code)
        self._let_end(rank)
        return PeerError(f"process {rank} of {self._size} failed first: {text}", code)

    def _write(self, rank: int | None, code: int, text: str) -> None:
        """Write onto the board, unless something stands there."""
        self._ask(lambda: self._store.compare_set(FIRST, "", json.dumps([rank, code, text])))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _let_end(self, rank: int) -> None:
        """Wait a moment for the process that failed first to end first: launchers look at who
        ends."""
        end = time.monotonic() + PATIENCE_SECONDS
        here = bool(self.peers) and self.peers[rank][0] == socket.gethostname()
        while here and rank not in self._local(_DEAD) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)

    def _noted(self, status: Status) -> PeerError | None:
        """Return what the main process has written into status.json on its way out."""
        with suppress(OSError, ValueError):
            found = status()
            beat = found.get("heartbeat") or {}
            code = found.get("exit_code")
            reason = str(found.get("reason", ""))
            same = (
                self._rank and self.peers and (beat.get("host"), beat.get("pid")) == self.peers[0]
            )
            if same and found.get("state") in ("failed", "preempted") and isinstance(code, int):
                peer = f"{PeerError.__name__}: "
                first = reason.startswith(peer)
                return PeerError(
                    reason.removeprefix(peer) if first else self._failed_first(reason), code
                )
        return None

    def _failed_first(self, reason: str) -> str:
        return f"process 0 of {self._size} failed first: {reason}"

    def _gone(self, error: BaseException) -> PeerError:
        text = ""
        if dead := self._local(_DEAD):
            text = f"{self._named(dead)} is gone without a word: killed, or crashed"
        elif stopped := self._local(_STOPPED):
            text = (
                f"{self._named(stopped)} is stopped (SIGSTOP, or a debugger) and has not answered within "
                "DISTRIBUTED.timeout_seconds"
            )
        if text:
            self._write(None, 1, text)
            return PeerError(text, 1)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        silent = self._silent()
        if found := self._written():  # somebody has taken that long to find out
            return found
        who = self._named(silent) if silent else f"another process of the {self._size}"
        return PeerError(
            f"{who} is gone or has not answered within DISTRIBUTED.timeout_seconds ({first}); look at its own log, and "
            "into stacks.txt",
            1,
        )

    def _silent(self) -> list[int]:
        """Return the processes that do not say, within a moment, that they have lost somebody as
        well."""
        told = self.told("lost", "1")
        return [rank for rank in range(self._size) if rank not in told]

    def told(self, key: str, text: str) -> dict[int, str]:
        """Tell the others something, and return what they tell, by number, as far as they do within
        a moment."""
        self._ask(lambda: self._store.set(f"{key}/{self._rank}", text))
        end = time.monotonic() + PATIENCE_SECONDS
        found = {self._rank: text}
        while len(found) < self._size and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            for rank in set(range(self._size)) - found.keys():
                if self._ask(partial(self._has, f"{key}/{rank}")):
                    found[rank] = (
                        self._ask(partial(self._store.get, f"{key}/{rank}")) or b""
                    ).decode()
        return found

    def _named(self, ranks: Sequence[int]) -> str:
        if self.peers:
            where = f" (pid {self.peers[ranks[0]][1]} on {self.peers[ranks[0]][0]})"
        else:
            where = ""
        if len(ranks) == 1:
            return f"process {ranks[0]} of {self._size}{where}"
        return f"one or more of the processes {', '.join(map(str, ranks))} of {self._size}"

    def _local(self, states: str) -> list[int]:
        """Return the processes of this machine that are in one of these states, see proc(5)."""
        here = socket.gethostname()
        others = [
            (rank, pid)
            for rank, (host, pid) in enumerate(self.peers)
            if host == here and rank != self._rank
        ]
        return [rank for rank, pid in others if _state(pid) in states]

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return what the store answers; None where it is gone or does not answer, after which it
        is left alone."""
        if self._store is None:
            return None
        found: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError, dist.DistError):
                found.append(question())

        asking = threading.Thread(target=ask, name="phasetrain-board", daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS)
        if not found:
            self._store = None
        if found:
            return found[0]
        return None


def _state(pid: int) -> str:
    """Return the letter of a process's state, `X` for one that is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _lost_in(error: BaseException) -> BaseException | None:
    """Return the error, or one that it came from, that tells of a lost process."""
    while not is_lost_peer(error):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return error


def _code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1
