"""Agreement of all ranks on stops and saves, at the same boundary between two steps."""

import re
from typing import Any, Literal

import torch
import torch.distributed as dist

from phasetrain.distributed.world import World

Request = Literal["stop", "signal", "minutes", "save", "recheck"]
REQUESTS: tuple[Request, ...] = ("stop", "signal", "minutes", "save", "recheck")
"""Stop; save because of a signal, because of elapsed minutes, or under a name; or compute the next
update twice."""


_CHECKPOINT_NAME = re.compile(r"[\w.-]+")


class Consensus:
    """Turns requests of single ranks into decisions of all ranks.

    In a run of one process a request takes effect at once. With several ranks, requests are
    combined after each step by an asynchronous all-reduce, whose result is read one step later: no
    rank waits, and all act at the same boundary.

    Args:
        world: the ranks.

    Attributes:
        stopping: reason for the stop once all ranks have agreed on it; else empty.
        interrupted: whether the run is only interrupted and may be resumed.
        paused: whether it is interrupted by `pause`.
        ending: reason for which the run ends for good, once the engine has turned the stop into
            the last tests; else empty. An interruption may still stop those.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._requests: set[Request] = set()
        self._agreed: set[Request] = set()
        self._reason = ("", False)
        self._sent = ("", False)
        # Kept apart from the first reason, which may be an interruption: the run has to end for
        # good after the resume.
        self._end = ""
        self._sent_end = ""
        self._name = ""
        self._in_flight: tuple[Any, torch.Tensor] | None = None
        self.stopping = ""
        self.interrupted = False
        self.paused = False
        self.ending = ""

    def ask_stop(self, reason: str, *, interrupted: bool) -> None:
        """Request a stop; only the first reason takes effect."""
        if self.ending and not interrupted:
            return
        if not interrupted and not self._end:
            self._end = reason
        if not self._reason[0]:
            self._reason = (reason, interrupted)
            self._requests.add("stop")
        if self._world.is_single_process:
            self.stopping, self.interrupted = self._reason

    def pause(self, reason: str) -> None:
        """Interrupt the run at this boundary, without a round of messages; every rank has to
        call."""
        self.stopping = reason
        self.interrupted = True
        self.paused = True

    def begin_ending(self) -> None:
        """Let the run continue with its last tests after a stop for good; every rank has to
        call."""
        self.ending = self.stopping
        self.stopping = ""
        if not self._reason[1]:
            self._reason = ("", False)
        elif not self._world.is_single_process:
            # This rank was interrupted at the same boundary, and the other reason was the first.
            self._requests.add("stop")

    def pending_end(self, *, at_phase_end: bool) -> tuple[str, int]:
        """Return the reason for which the run was asked to end for good, or an empty string, and
        the number of further steps before that takes effect.

        A checkpoint keeps both: a run that is killed before it has ended must end at the same step.
        A collective call, to be made before `agree` at the same boundary.
        """
        if self.ending:
            return self.ending, 0
        if self._world.is_single_process:
            return self._end, 0
        gathered = self._world.all_gather((self._sent_end, self._end))
        if sent := next((sent_end for sent_end, _ in gathered if sent_end), ""):
            return sent, 0
        reason = next((end for _, end in gathered if end), "")
        # At the end of a phase `agree` waits for the requests made at the same boundary.
        return reason, int(bool(reason) and not at_phase_end)

    def restore_end(self, reason: str, steps: int) -> None:
        """Restore the result of `pending_end`; every rank has to call."""
        self._end = reason
        self._reason = (reason, False)
        if not steps:
            self.stopping, self.interrupted = self._reason
        elif not self._world.is_single_process:
            # As at the boundary of the checkpoint, where the former attempt has sent the request.
            self._requests.add("stop")
            self._send_requests()

    def ask_save(self, name: str) -> None:
        """Request a named checkpoint at the next agreed boundary; it is never deleted.

        Args:
            name: letters, digits, dots, dashes and underscores; `latest` and `best` are reserved.

        Raises:
            ValueError: the name is not allowed.
        """
        if _CHECKPOINT_NAME.fullmatch(name) is None or name in ("latest", "best"):
            raise ValueError(
                f"name = {name!r}: expected letters, digits, dots, dashes and underscores; latest "
                "and best are reserved"
            )
        self._name = name
        self.ask("save")

    def take_save(self) -> str:
        """Return the name of a requested checkpoint once, or an empty string."""
        if not self.take("save"):
            return ""
        # Ranks may have asked under different names: the lowest rank's name wins everywhere.
        names = self._world.all_gather(self._name)
        self._name = ""
        return next((name for name in names if name), "")

    def ask(self, request: Request) -> None:
        """Request something that all ranks have to do together."""
        if self._world.is_single_process:
            self._agreed.add(request)
        else:
            self._requests.add(request)

    def take(self, request: Request) -> bool:
        """Return whether all ranks have agreed on a request, and clear it."""
        if request not in self._agreed:
            return False
        self._agreed.discard(request)
        return True

    def agree(self, *, wait: bool = False, pause: str = "") -> bool:
        """Pass a boundary between two steps and return whether the run stops here.

        Args:
            wait: agree on the requests made up to now, not only up to the previous boundary;
                used at the end of a phase.
            pause: why the run pauses here unless it stops anyway; the same on all ranks, or empty.
        """
        if self._world.is_single_process:
            self.stopping, self.interrupted = self._reason
        if not self.stopping and not self._world.is_single_process:
            self._receive_agreement()
        # Before anything is sent: requests of this boundary are kept in the checkpoint, and are
        # sent by the resume.
        if pause and not self.stopping:
            self.pause(pause)
        if not self.stopping and not self._world.is_single_process:
            self._send_requests()
            if wait:
                self._receive_agreement()
        return bool(self.stopping)

    def _send_requests(self) -> None:
        flags = torch.tensor([request in self._requests for request in REQUESTS], dtype=torch.int32)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        self._requests.clear()
        self._sent = self._reason
        self._sent_end = self._end
        # The tensor is kept with the handle: gloo writes into it until wait() returns.
        self._in_flight = (work, flags)

    def _receive_agreement(self) -> None:
        if self._in_flight is None:
            return
        work, flags = self._in_flight
        self._in_flight = None
        work.wait()
        agreed = {
            request for request, is_set in zip(REQUESTS, flags.tolist(), strict=True) if is_set
        }
        self._agreed |= agreed - {"stop"}
        if "stop" in agreed:
            # What was sent: a request of the present boundary takes effect at the next one.
            reasons = [entry for entry in self._world.all_gather(self._sent) if entry[0]]
            self.stopping, self.interrupted = reasons[0]
