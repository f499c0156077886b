"""The ranks of a run as one of them sees them, and the objects they exchange."""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phasetrain.distributed.failures import Failures
from phasetrain.errors import PeerError, PhasetrainError

T = TypeVar("T")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class World:
    """The ranks of a run, seen from one of them.

    The methods are collectives: every rank has to call them, in the same order. They use a gloo
    group between CPUs, separate from the group that reduces gradients. In a run of one process
    they return at once. Objects are pickled, and their tensors arrive on the CPU.

    Attributes:
        rank: rank of this process, from 0.
        size: world size.
        local_rank: rank of this process on its machine, from 0.
        control: gloo group of all ranks for objects and decisions; None in a run of one process,
            and in a world that is only used to compute shards.
        failures: reports which rank failed first; None as for `control`.
        timeout_seconds: how long one rank waits for another.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = field(default=0, compare=False)
    control: Any = field(default=None, compare=False, repr=False)
    failures: Failures | None = field(default=None, compare=False, repr=False)
    timeout_seconds: float = field(default=600.0, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files that a run has once."""
        return self.rank == 0

    @cached_property  # asked for several times in every step
    def is_single_process(self) -> bool:
        """Whether the world size is 1."""
        return self.size == 1

    def shard(self, start: int, stop: int) -> tuple[int, int]:
        """Return this rank's contiguous slice of [start, stop); sizes differ by at most one."""
        count = stop - start
        begin = start + count * self.rank // self.size
        return begin, start + count * (self.rank + 1) // self.size

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.is_single_process:
            return value
        box = [_pickle_on_cpu(value) if self.is_main else b""]
        dist.broadcast_object_list(box, src=0, group=self._control_group())
        return value if self.is_main else pickle.loads(box[0])

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in rank order, on rank 0; None on the others."""
        if self.is_single_process:
            return [value]
        box: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(_pickle_on_cpu(value), box, dst=0, group=self._control_group())
        return None if box is None else _unpickle_all(box)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.is_single_process:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, _pickle_on_cpu(value), group=self._control_group())
        return _unpickle_all(box)

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on every rank.

        Raises:
            PeerError: on the other ranks, if the function raised on rank 0; rank 0 itself raises
                the original error.
        """
        if self.is_single_process:
            return function()
        if not self.is_main:
            result, exit_code, reason = self.broadcast((None, 0, ""))
            if reason:
                raise PeerError(reason, exit_code)
            return result  # type: ignore[return-value]
        try:
            result = function()
        except Exception as error:
            # The others wait in broadcast(): tell them before the error leaves this frame.
            exit_code = error.exit_code if isinstance(error, PhasetrainError) else 1
            self.broadcast((None, exit_code, f"{type(error).__name__}: {error}"))
            raise
        self.broadcast((result, 0, ""))
        return result

    def all_reduce_sum(self, count: Number) -> Number:
        """Return the sum of a number over all ranks; all of them pass an int, or all a float."""
        if self.is_single_process:
            return count
        # int64 and float64: sample counts must stay exact, and float32 is exact only to 2**24.
        dtype = torch.int64 if isinstance(count, int) else torch.float64
        result = torch.tensor(count, dtype=dtype)
        dist.all_reduce(result, group=self._control_group())
        return type(count)(result)

    def all_reduce_max(self, value: float) -> float:
        """Return the largest value over all ranks."""
        if self.is_single_process:
            return value
        result = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self._control_group())
        return float(result)

    def new_group(self) -> Any:
        """Return another gloo group of all ranks; a collective call.

        A background thread needs a separate group: calls of two threads on one group could
        interleave differently on each rank.
        """
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))

    def _control_group(self) -> Any:
        assert self.control is not None, "this world has not joined a process group"
        return self.control


class _CpuPickler(pickle.Pickler):
    """Pickles tensors of every device as tensors on the CPU."""

    # By itself torch restores a tensor on the device index of its sender. That is the device of
    # another rank, or one that this process cannot see.
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def _pickle_on_cpu(value: object) -> bytes:
    buffer = io.BytesIO()
    _CpuPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _unpickle_all(pickled: list[bytes]) -> list[Any]:
    # From the last to the first, and each string is freed before the next object is made: the state
    # of one rank, which may have several GB, is in memory twice, and not that of all ranks.
    return [pickle.loads(pickled.pop()) for _ in range(len(pickled))][::-1]
