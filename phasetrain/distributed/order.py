"""The same collective calls on all processes, in the same order (`DISTRIBUTED.debug`)."""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from phasetrain.distributed.world import World
from phasetrain.errors import OrderError


class Call(NamedTuple):
    """What a method of torch's ProcessGroup does.

    Attributes:
        name: what a person calls it.
        same: number of the argument whose tensors have the same shape and type on all processes;
            None where they need not.
    """

    name: str
    same: int | None = None


CALLS: Mapping[str, Call] = {
    "allreduce": Call("all_reduce", 0),
    "allreduce_coalesced": Call("all_reduce_coalesced", 0),
    "broadcast": Call("broadcast", 0),
    "reduce": Call("reduce", 0),
    "allgather": Call("all_gather", 1),
    "allgather_coalesced": Call("all_gather_coalesced", 1),
    "all_gather_single": Call("all_gather_single", 1),
    "_allgather_base": Call("all_gather_into_tensor", 1),
    "gather": Call("gather", 1),
    "scatter": Call("scatter", 0),
    "reduce_scatter": Call("reduce_scatter", 0),
    "reduce_scatter_single": Call("reduce_scatter_single", 0),
    "_reduce_scatter_base": Call("reduce_scatter_tensor", 0),
    "all_to_all_single": Call("all_to_all_single"),
    "alltoall_base": Call("all_to_all_single"),
    "alltoall": Call("all_to_all"),
    "barrier": Call("barrier"),
}
"""The collective calls through which those of `torch.distributed` go, by the method of
ProcessGroup."""

LENGTH = 1024
"""Bytes of a description; all have the same number, so that one exchange is enough."""

PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders of code that makes collective calls for others: what a person looks for is who asked for
one."""


@dataclass(frozen=True)
class _Guard:
    """Compares calls.

    Attributes:
        world: the processes.
        group: over which they tell each other what they are about to do.
        timeout_seconds: how long one waits for the others.
        thread: whose calls are compared; others have an order of their own.
        gather: ProcessGroup.allgather as it was.
    """

    world: World
    group: Any
    timeout_seconds: float
    thread: int
    gather: Callable[..., Any]

    def see(self, method: str, group: Any, args: tuple[Any, ...], options: Any) -> None:
        """Compare a call with that of the others.

        Raises:
            OrderError: they make another one, or do not come.
        """
        if threading.get_ident() != self.thread or group.size() != self.world.size:
            return
        text = _described(method, args, options)
        calls = self._of_all(text)
        if any(call != calls[0] for call in calls):
            told = "; ".join(f"process {rank}: {call}" for rank, call in enumerate(calls))
            raise OrderError(
                f"DISTRIBUTED.debug: the processes do not make the same collective call next ({told}); every process "
                "has to make the same calls in the same order, so none may stand in a branch that only some take"
            )

    def _of_all(self, text: str) -> list[str]:
        mine = torch.frombuffer(bytearray(text.encode()[:LENGTH].ljust(LENGTH)), dtype=torch.uint8)
        found = [torch.empty(LENGTH, dtype=torch.uint8) for _ in range(self.world.size)]
        try:
            self.gather(self.group, [found], [mine], AllgatherOptions()).wait()
        except RuntimeError as error:
            if not re.search("timed out|timeout", str(error), re.IGNORECASE):
                raise  # another process has gone
            raise OrderError(self._late(text)) from None
        return [bytes(one.tolist()).decode(errors="replace").rstrip() for one in found]

    def _late(self, text: str) -> str:
        assert self.world.failures is not None
        told = self.world.failures.told("waits", text)
        waits = "; ".join(f"process {rank} waits in {told[rank]}" for rank in sorted(told))
        others = ", ".join(str(rank) for rank in range(self.world.size) if rank not in told)
        return (
            f"DISTRIBUTED.debug: not all {self.world.size} processes have come to the same collective call within "
            f"DISTRIBUTED.timeout_seconds = {self.timeout_seconds:g} ({waits}"
            f"{f'; not there: {others}' if others else ''}): those that are not there wait for something else, or are "
            "stopped; a call that only some processes make is not in its place there"
        )


@contextmanager
def guarded(world: World, *, timeout_seconds: float, debug: bool = True) -> Iterator[None]:
    """Compare, before each collective call of the main thread over all processes, what each is
    about to do.

    Without it, torch adds up what does not belong together, or waits until the timeout. The calls
    of DDP's own backward pass are made in C++ and are not compared. Costs an exchange per call;
    nothing where it is off.

    Args:
        world: the processes.
        timeout_seconds: how long one waits for the others.
        debug: whether to.

    Raises:
        OrderError: on all processes, with the place in the code of each.
    """
    if world.is_single_process or not debug:
        yield
        return
    from unittest.mock import patch  # puts methods in place of others and back again; rarely wanted

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    kept = {
        method: vars(dist.ProcessGroup)[method]
        for method in CALLS
        if method in vars(dist.ProcessGroup)
    }
    guard = _Guard(
        world, group, timeout_seconds, threading.get_ident(), dist.ProcessGroup.allgather
    )
    compared: dict[str, Any] = {name: _compared(guard, name, call) for name, call in kept.items()}
    with patch.multiple(dist.ProcessGroup, **compared):
        yield


def _compared(guard: _Guard, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def compared(group: Any, *args: Any, **named: Any) -> Any:
        guard.see(method, group, args, named.get("opts", args[-1] if args else None))
        return call(group, *args, **named)

    return compared


def _described(method: str, args: tuple[Any, ...], options: Any) -> str:
    """Return a call in words: what, of which tensors, and where in the code."""
    call = CALLS[method]
    frame = sys._getframe(3)
    name, site = _asked(frame, call.name)
    tensors = [] if call.same is None or call.same >= len(args) else list(_tensors(args[call.same]))
    of = ", ".join(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in tensors)
    return f"{name}{_details(options)}{f' of {of}' if of else ''} at {site}"


def _asked(frame: FrameType | None, name: str) -> tuple[str, str]:
    """Return the function of torch.distributed that was called, and from where, outside of torch
    and of this folder."""
    collective = str(Path(dist.__file__).parent / "distributed_c10d.py")
    place = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == collective:
            name = frame.f_code.co_name
        place = f"{file}:{frame.f_lineno}"
        if not file.startswith(PASSED_OVER):
            break
        frame = frame.f_back
    return name, place


def _details(options: Any) -> str:
    """Return which sum, and from or to which process, as far as the options of a call say."""
    if isinstance(options, dist.AllreduceOptions | dist.ReduceOptions | dist.ReduceScatterOptions):
        reduction: Any = options.reduceOp
        return f" {reduction.op.name}"
    if isinstance(options, dist.BroadcastOptions | dist.ScatterOptions | dist.GatherOptions):
        return f" root {options.rootRank}"
    return ""


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _tensors(one)
