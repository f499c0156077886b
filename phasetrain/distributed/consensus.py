"""What one process asks for and all do at the same boundary between two steps."""

import re
from typing import Any, Literal

import torch
import torch.distributed as dist

from phasetrain.distributed.world import World

Wish = Literal["stop", "signal", "minutes", "save"]
WISHES: tuple[Wish, ...] = ("stop", "signal", "minutes", "save")
"""What may be asked for: an end, a save because of a signal or because time has passed, or one
under a name."""


_NAME = re.compile(r"[\w.-]+")


class Consensus:
    """Brings wishes of single processes to all of them.

    With one process a wish holds at once. With several the wishes of all go round after each step
    without anybody waiting, and hold, on all processes alike, when the round is read a step later.

    Args:
        world: the processes.

    Attributes:
        stopping: why the run stops, once that is agreed; else empty.
        interrupted: whether it stops only for now.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._wishes: set[Wish] = set()
        self._agreed: set[Wish] = set()
        self._reason = ("", False)
        self._name = ""
        self._round: tuple[Any, torch.Tensor] | None = None
        self.stopping = ""
        self.interrupted = False

    def ask_stop(self, reason: str, *, interrupted: bool) -> None:
        """Ask for an end; the first reason stands."""
        if not self._reason[0]:
            self._reason = reason, interrupted
            self._wishes.add("stop")
        if self._world.is_single_process:
            self.stopping, self.interrupted = self._reason

    def ask_save(self, name: str) -> None:
        """Ask for a checkpoint under a name, which is kept for good; it is made at a boundary
        between two steps.

        Args:
            name: letters, digits, dots, dashes and underscores; `latest` and `best` have a meaning
                of their own.

        Raises:
            ValueError: another name.
        """
        if _NAME.fullmatch(name) is None or name in ("latest", "best"):
            raise ValueError(
                f"name = {name!r}: a checkpoint is named by letters, digits and . - _, not latest or best"
            )
        self._name = name
        self.ask("save")

    def take_save(self) -> str:
        """Return the name under which a checkpoint is asked for, which is then made; empty for
        none."""
        if not self.take("save"):
            return ""
        found = next((name for name in self._world.all_gather(self._name) if name), "")
        self._name = ""
        return found

    def ask(self, wish: Wish) -> None:
        """Ask for something else."""
        (self._agreed if self._world.is_single_process else self._wishes).add(wish)

    def take(self, wish: Wish) -> bool:
        """Tell whether a wish is agreed on, which is then fulfilled."""
        if wish not in self._agreed:
            return False
        self._agreed.discard(wish)
        return True

    def turn(self, *, wait: bool = False) -> bool:
        """Pass a boundary between two steps, and tell whether the run stops here.

        Args:
            wait: what is asked for now holds now; at the end of a phase.
        """
        if self._world.is_single_process or self.stopping:
            return bool(self.stopping)
        self._receive()
        if wait and not self.stopping:
            self._send()
            self._receive()
        elif not self.stopping:
            self._send()
        return bool(self.stopping)

    def _send(self) -> None:
        asked = torch.tensor([wish in self._wishes for wish in WISHES], dtype=torch.int32)
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        self._wishes.clear()
        self._round = work, asked

    def _receive(self) -> None:
        if self._round is None:
            return
        (work, asked), self._round = self._round, None
        work.wait()
        agreed = {
            wish for wish, any_process in zip(WISHES, asked.tolist(), strict=True) if any_process
        }
        self._agreed |= agreed - {"stop"}
        if "stop" in agreed:
            told = [reason for reason in self._world.all_gather(self._reason) if reason[0]]
            self.stopping, self.interrupted = told[0]
