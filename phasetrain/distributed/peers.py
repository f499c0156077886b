"""The other processes of a run: their states on this machine, and a board in the store to reach
them without a collective."""

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

FIRST_FAILURE = "failed"
"""Key of the first failure in the store."""

PATIENCE_SECONDS = 1.0
"""How long a rank that has lost another one waits to learn why, and who else has."""

ANSWER_SECONDS = 1.0
"""How long the store may take to answer; the store of a stopped process never does."""

POLL_SECONDS = 0.05

# State letters of /proc/PID/stat, see proc(5); X is also used for a process that no longer exists.
_DEAD = "ZXx"
_STOPPED = "Tt"


class Peers:
    """The processes of a run, by rank.

    Args:
        rank: rank of this process.
        size: world size.
        processes: host and process id of each rank; may be empty if unknown.
    """

    def __init__(self, rank: int, size: int, processes: Sequence[tuple[str, int]] = ()) -> None:
        self.rank = rank
        self.size = size
        self.processes = tuple(processes)

    def find_dead(self) -> list[int]:
        """Return the ranks on this machine whose process has ended."""
        return self._find_in_state(_DEAD)

    def find_stopped(self) -> list[int]:
        """Return the ranks on this machine whose process is stopped (SIGSTOP, or a debugger)."""
        return self._find_in_state(_STOPPED)

    def is_on_this_machine(self, rank: int) -> bool:
        """Tell whether a rank is known to run on this machine."""
        return bool(self.processes) and self.processes[rank][0] == socket.gethostname()

    def describe(self, ranks: Sequence[int]) -> str:
        """Return ranks in words, with process id and host if there is only one."""
        if len(ranks) > 1:
            return f"one or more of the ranks {', '.join(map(str, ranks))} of {self.size}"
        process = ""
        if self.processes:
            host, pid = self.processes[ranks[0]]
            process = f" (pid {pid} on {host})"
        return f"rank {ranks[0]} of {self.size}{process}"

    def _find_in_state(self, letters: str) -> list[int]:
        return [
            rank
            for rank, (_, pid) in enumerate(self.processes)
            if rank != self.rank and self.is_on_this_machine(rank) and _read_state(pid) in letters
        ]


def _read_state(pid: int) -> str:
    try:
        # The name of the program, in brackets, may itself contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class FailureBoard:
    """Keys in the store of the process group, through which ranks talk after a failure.

    Collectives are no longer possible then. A store that does not answer is not asked again.

    Args:
        store: the store of the process group.
        rank: rank of this process.
        size: world size.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def post_failure(self, failure: dict[str, Any]) -> None:
        """Write a failure onto the board, unless another rank was first."""
        # compare_set is atomic: of two ranks that fail at once, one wins.
        self._ask(lambda: self._store.compare_set(FIRST_FAILURE, "", json.dumps(failure)))

    def read_failure(self) -> dict[str, Any] | None:
        """Return the first failure, or None."""
        text = self._read(FIRST_FAILURE)
        return json.loads(text) if text else None

    def confirm(self) -> None:
        """Note that this rank knows why the run ends."""
        self._ask(lambda: self._store.set(f"heard/{self._rank}", "1"))

    def has_confirmed(self, rank: int) -> bool:
        """Tell whether another rank knows why the run ends."""
        return self._read(f"heard/{rank}") is not None

    def exchange(self, key: str, text: str) -> dict[int, str]:
        """Post a text, and return the texts that other ranks post within a moment, by rank."""
        self._ask(lambda: self._store.set(f"{key}/{self._rank}", text))
        end = time.monotonic() + PATIENCE_SECONDS
        texts = {self._rank: text}
        while len(texts) < self._size and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            for rank in set(range(self._size)) - texts.keys():
                posted = self._read(f"{key}/{rank}")
                if posted is not None:
                    texts[rank] = posted
        return texts

    def _read(self, key: str) -> str | None:
        # get() alone would wait for the key until the timeout of the store.
        value = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if value is None else value.decode()

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer, or None if it is gone or does not answer in time."""
        if self._store is None:
            return None
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError, dist.DistError):
                answers.append(question())

        # In a thread: a request to the store of a stopped process cannot be given a timeout.
        thread = threading.Thread(target=ask, name="phasetrain-board", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        if answers:
            return answers[0]
        self._store = None
        return None
