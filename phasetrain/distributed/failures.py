"""Finds the rank that failed first: all ranks end with its error."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from phasetrain.distributed.peers import PATIENCE_SECONDS, POLL_SECONDS, FailureBoard, Peers
from phasetrain.errors import PeerError, PhasetrainError

CONFIRM_SECONDS = 0.3
"""How long rank 0 waits for the others to read the board, since its store ends with it."""

Status = Callable[[], Mapping[str, Any]]
"""Returns the content of status.json, which rank 0 writes."""

_LOST_CONNECTION = re.compile(
    r"gloo|nccl|tcpstore|connection (closed|reset|refused)|broken pipe|timed out waiting"
    r"|timeout caused pair closure|recvvector failed|connection was likely closed|process group",
    re.IGNORECASE,
)
"""Messages of torch's RuntimeErrors when another rank is gone; they have no class in common."""

_COMMUNICATION_CODE = re.compile(
    r"[/\\](torch[/\\](distributed|autograd|nn[/\\]parallel|_)|fairscale[/\\]|"
    r"phasetrain[/\\](distributed|addons[/\\]sharding)[/\\])"
)
"""Files that communicate with other ranks; the backward pass does too, through DDP's hooks."""


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an error only says that another rank is gone or does not answer."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, PhasetrainError):
        return False
    if not _LOST_CONNECTION.search(str(error)):
        return False
    # The message alone is not enough: a dataset may have lost a connection to its own server.
    return "gloo/transport" in str(error) or bool(_COMMUNICATION_CODE.search(_raising_file(error)))


def _raising_file(error: BaseException) -> str:
    trace = error.__traceback__
    file = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return file


class Failures:
    """Decides which error this rank ends with: its own, or the first failure of another rank.

    Args:
        store: the store of the process group.
        rank: rank of this process.
        size: world size.
        peers: host and process id of each rank.
    """

    def __init__(
        self, store: Any, rank: int, size: int, peers: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.board = FailureBoard(store, rank, size)
        self.peers = Peers(rank, size, peers)

    def find_cause(self, error: BaseException, status: Status = dict) -> BaseException:
        """Return the error that this rank ends with.

        An error of this rank is posted for the others. If this rank has only lost another one, it
        waits a moment to learn why.

        Args:
            error: the error of this rank.
            status: reads status.json, the only trace of rank 0 once its store is gone.
        """
        if isinstance(error, PeerError):
            return error
        lost = _find_lost_peer(error)
        if lost is not None:
            cause = self._wait_for_failure(status) or self._lost_peer_error(lost)
            self.board.confirm()
            return cause
        self.board.post_failure(
            {
                "rank": self.peers.rank,
                "exit_code": _exit_code(error),
                "text": _describe_error(error)[:4000],
            }
        )
        return error

    def wait_until_heard(self) -> None:
        """Wait a moment until all living ranks know why they end; the store ends with this process.

        Ranks that wait for this one alone notice only when it has ended, and read status.json.
        """
        waiting = set(range(self.peers.size)) - {self.peers.rank}
        end = time.monotonic() + CONFIRM_SECONDS
        while time.monotonic() < end:
            waiting -= set(self.peers.find_dead())
            waiting = {rank for rank in waiting if not self.board.has_confirmed(rank)}
            if not waiting:
                return
            time.sleep(POLL_SECONDS)

    def _wait_for_failure(self, status: Status) -> PeerError | None:
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            # Look for the dead before reading: a rank posts its failure before it ends, so one
            # that was dead by now and has posted nothing never will.
            dead = self.peers.find_dead()
            failure = self._read_board() or self._read_status(status)
            if failure or dead or time.monotonic() > end:
                return failure
            time.sleep(POLL_SECONDS)

    def _read_board(self) -> PeerError | None:
        failure = self.board.read_failure()
        if failure is None:
            return None
        rank = failure["rank"]
        if rank is None:  # it ended without posting anything, and another rank has noticed
            return PeerError(failure["text"], code=failure["code"], ranks=failure["lost"])
        self._wait_for_end(rank)
        return self._failed_first(rank, failure["text"], failure["exit_code"])

    def _wait_for_end(self, rank: int) -> None:
        """Wait a moment for the rank that failed first to end first."""
        # torchrun and srun report the exit code of the process that ends first.
        if not self.peers.is_on_this_machine(rank):
            return
        end = time.monotonic() + PATIENCE_SECONDS
        while rank not in self.peers.find_dead() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def _read_status(self, status: Status) -> PeerError | None:
        """Return the failure that rank 0 has written into status.json on its way out."""
        if self.peers.rank == 0 or not self.peers.processes:
            return None
        with suppress(OSError, ValueError):
            content = status()
            heartbeat = content.get("heartbeat") or {}
            exit_code = content.get("exit_code")
            # The file may be left over from an earlier attempt, by another process.
            if (heartbeat.get("host"), heartbeat.get("pid")) != self.peers.processes[0]:
                return None
            has_ended = content.get("state") in ("failed", "preempted", "interrupted")
            if not has_ended or not isinstance(exit_code, int):
                return None
            reason = str(content.get("reason", ""))
            passed_on = f"{PeerError.__name__}: "
            if reason.startswith(passed_on):  # rank 0 itself has ended because of another rank
                return PeerError(reason.removeprefix(passed_on), exit_code)
            return self._failed_first(0, reason, exit_code)
        return None

    def _failed_first(self, rank: int, text: str, exit_code: int) -> PeerError:
        message = f"rank {rank} of {self.peers.size} failed first: {text}"
        return PeerError(message, exit_code, ranks=[rank])

    def _lost_peer_error(self, error: BaseException) -> PeerError:
        """Return an error that names the ranks that are gone and have posted nothing."""
        if dead := self.peers.find_dead():
            text = (
                f"{self.peers.describe(dead)} has ended without an error report: it was killed or "
                "crashed"
            )
            return self._post_lost(text, "distributed.peer_died", dead)
        if stopped := self.peers.find_stopped():
            text = (
                f"{self.peers.describe(stopped)} is stopped (SIGSTOP, or a debugger) and has not "
                "answered within DISTRIBUTED.timeout_seconds"
            )
            return self._post_lost(text, "distributed.peer_stopped", stopped)
        # On other machines a process's state cannot be read: the ranks that have lost
        # another one say so on the board, and the silent ones are the suspects.
        responding = self.board.exchange("lost", "1")
        silent = [rank for rank in range(self.peers.size) if rank not in responding]
        if failure := self._read_board():  # another rank took that long to find the cause
            return failure
        who = f"another of the {self.peers.size} ranks"
        if silent:
            who = self.peers.describe(silent)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return PeerError(
            f"{who} is gone or has not answered within DISTRIBUTED.timeout_seconds ({lines[0]}); "
            "see its log and stacks.txt",
            code="distributed.peer_silent",
            ranks=silent,
        )

    def _post_lost(self, text: str, code: str, ranks: Sequence[int]) -> PeerError:
        self.board.post_failure({"rank": None, "text": text, "code": code, "lost": list(ranks)})
        return PeerError(text, code=code, ranks=ranks)


def _find_lost_peer(error: BaseException) -> BaseException | None:
    """Return the error, or one among its causes, that reports a lost rank."""
    cause: BaseException | None = error
    while cause is not None and not is_lost_peer(cause):
        cause = cause.__cause__
    return cause


def _exit_code(error: BaseException) -> int:
    if isinstance(error, PhasetrainError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def _describe_error(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        code = _exit_code(error)
        second_signal = " (a second signal)" if code > 128 else ""
        return f"it ended at once with code {code}{second_signal}"
    if str(error):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
