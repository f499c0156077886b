"""Checks that all ranks make the same collective calls in the same order (`DISTRIBUTED.debug`).

`TORCH_DISTRIBUTED_DEBUG=DETAIL` compares per process group, so a rank in a call on one group while
the others are in a call on another is only found at the timeout; neither does it compare the
operation, the root, or the line of code.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from phasetrain import distributed
from phasetrain.distributed import World
from phasetrain.errors import OrderError
from phasetrain.runtime.nested import list_tensors


class Collective(NamedTuple):
    """A method of torch's ProcessGroup.

    Attributes:
        name: the function of torch.distributed it is known by.
        tensors: position of the argument whose tensors have the same shape and dtype on all ranks;
            None if they need not.
    """

    name: str
    tensors: int | None = None


COLLECTIVES: Mapping[str, Collective] = {
    "allreduce": Collective("all_reduce", 0),
    "allreduce_coalesced": Collective("all_reduce_coalesced", 0),
    "broadcast": Collective("broadcast", 0),
    "reduce": Collective("reduce", 0),
    "allgather": Collective("all_gather", 1),
    "allgather_coalesced": Collective("all_gather_coalesced", 1),
    "all_gather_single": Collective("all_gather_single", 1),
    "_allgather_base": Collective("all_gather_into_tensor", 1),
    "gather": Collective("gather", 1),
    "scatter": Collective("scatter", 0),
    "reduce_scatter": Collective("reduce_scatter", 0),
    "reduce_scatter_single": Collective("reduce_scatter_single", 0),
    "_reduce_scatter_base": Collective("reduce_scatter_tensor", 0),
    "all_to_all_single": Collective("all_to_all_single"),
    "alltoall_base": Collective("all_to_all_single"),
    "alltoall": Collective("all_to_all"),
    "barrier": Collective("barrier"),
}
"""Methods of ProcessGroup that the functions of torch.distributed call."""

DESCRIPTION_BYTES = 1024
"""Fixed length of a description, so that one all-gather is enough."""

_COLLECTIVE_FILE = str(Path(dist.__file__).parent / "distributed_c10d.py")

_LIBRARY_CODE = (
    str(Path(torch.__file__).parent),
    str(Path(distributed.__file__).parent),
    __file__,
)
"""Code that makes collective calls on behalf of others; the line to report is the caller's."""


@dataclass(frozen=True)
class _CollectiveChecker:
    """Compares the calls of all ranks.

    Attributes:
        world: the ranks.
        group: group over which descriptions are exchanged.
        thread: id of the thread whose calls are compared; other threads have their own order.
        all_gather: the original ProcessGroup.allgather.
    """

    world: World
    group: Any
    thread: int
    all_gather: Callable[..., Any]

    def compare_call(self, method: str, group: Any, args: tuple[Any, ...], options: Any) -> None:
        """Compare a call of this rank with the next call of the others.

        Raises:
            OrderError: another rank makes another call, or none within the timeout.
        """
        # Groups of some of the ranks have their own order; only calls of all are comparable.
        if threading.get_ident() != self.thread or group.size() != self.world.size:
            return
        calls = self._gather_descriptions(_describe_call(method, args, options))
        if any(call != calls[0] for call in calls):
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise OrderError(
                "DISTRIBUTED.debug: the ranks do not make the same collective call next "
                f"({listed}); every rank has to make the same calls in the same order, so none "
                "may be in a branch that only some ranks take",
                code="distributed.collective_order",
            )

    def _gather_descriptions(self, text: str) -> list[str]:
        data = bytearray(text.encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES))
        mine = torch.frombuffer(data, dtype=torch.uint8)
        buffers = [torch.empty_like(mine) for _ in range(self.world.size)]
        try:
            self.all_gather(self.group, [buffers], [mine], AllgatherOptions()).wait()
        except RuntimeError as error:
            if not re.search("timed out|timeout", str(error), re.IGNORECASE):
                raise  # the connection is lost: Failures finds out which rank is gone
            raise self._timeout_error(text) from None
        return [bytes(buffer.tolist()).decode(errors="replace").rstrip() for buffer in buffers]

    def _timeout_error(self, text: str) -> OrderError:
        assert self.world.failures is not None
        waiting = self.world.failures.board.exchange("waits", text)
        places = [f"rank {rank} waits in {waiting[rank]}" for rank in sorted(waiting)]
        missing = [str(rank) for rank in range(self.world.size) if rank not in waiting]
        if missing:
            places.append(f"missing: {', '.join(missing)}")
        return OrderError(
            f"DISTRIBUTED.debug: not all {self.world.size} ranks have reached the same collective "
            f"call within DISTRIBUTED.timeout_seconds = {self.world.timeout_seconds:g} "
            f"({'; '.join(places)}): the missing ranks wait for something else or are stopped; "
            "look for a collective call that only some ranks make",
            code="distributed.collective_timeout",
        )


@contextmanager
def check_collective_order(world: World) -> Iterator[None]:
    """Compare each collective call of the main thread over all ranks before it is made.

    Without the check, torch reduces tensors that do not belong together, or waits for the timeout.
    Calls of DDP's own backward pass are made in C++ and are not compared. Each call costs one more
    exchange.

    Args:
        world: the ranks.

    Raises:
        OrderError: on all ranks, with the line of code of each.
    """
    # Replaced on the class, since every function of torch.distributed ends in one of these
    # methods. vars() instead of getattr: only methods of the class itself can be put back.
    methods = {name: vars(dist.ProcessGroup).get(name) for name in COLLECTIVES}
    originals = {name: method for name, method in methods.items() if method is not None}
    checker = _CollectiveChecker(
        world,
        world.new_group(),
        threading.get_ident(),
        dist.ProcessGroup.allgather,
    )
    try:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, _checked_method(checker, name, method))
        yield
    finally:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)


def _checked_method(
    checker: _CollectiveChecker, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **named: Any) -> Any:
        options = named.get("opts", args[-1] if args else None)
        checker.compare_call(name, group, args, options)
        return method(group, *args, **named)

    return call


def _describe_call(method: str, args: tuple[Any, ...], options: Any) -> str:
    """Return the function, its options and tensors, and the calling line, as one text."""
    collective = COLLECTIVES[method]
    name, line = _find_caller(collective.name)
    of = ""
    if collective.tensors is not None and collective.tensors < len(args):
        tensors = list_tensors(args[collective.tensors])
        of = " of " + ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for tensor in tensors
        )
    return f"{name}{_describe_options(options)}{of} at {line}"


def _find_caller(name: str) -> tuple[str, str]:
    """Return the function of torch.distributed that was called, and the first line outside of
    torch and of this folder that led to it."""
    frame = sys._getframe(1)
    line = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _COLLECTIVE_FILE:
            name = frame.f_code.co_name
        line = f"{file}:{frame.f_lineno}"
        if not file.startswith(_LIBRARY_CODE):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return name, line


def _describe_options(options: Any) -> str:
    """Return the reduction or the root, if the options of a call contain one."""
    if isinstance(options, dist.AllreduceOptions | dist.ReduceOptions | dist.ReduceScatterOptions):
        reduction: Any = options.reduceOp
        return f" {reduction.op.name}"
    if isinstance(options, dist.BroadcastOptions | dist.ScatterOptions | dist.GatherOptions):
        return f" root {options.rootRank}"
    return ""
