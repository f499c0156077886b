"""The processes of a run, seen from one of them, and what they tell each other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phasetrain.distributed.failures import Failures
from phasetrain.errors import PeerError, PhasetrainError

T = TypeVar("T")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    What is told here goes over a group of its own between CPUs, beside that of the gradients; every
    process has to take part, at the same place. One process tells itself everything at no cost.

    Attributes:
        rank: number of this process, from 0; process 0 is the main one.
        size: number of processes.
        local_rank: number of this process on its machine, from 0.
        control: group for decisions; None where there is one process, or where only shares are
            looked at.
        failures: who failed first; None as above.
        timeout_seconds: how long one process waits for another.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = field(default=0, compare=False)
    control: Any = field(default=None, compare=False, repr=False)
    failures: Failures | None = field(default=None, compare=False, repr=False)
    timeout_seconds: float = field(default=600.0, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once per run."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether the run has one process."""
        return self.size == 1

    def shard(self, start: int, stop: int) -> tuple[int, int]:
        """Return this process's slice of the global batch [start, stop): contiguous, even to within
        one sample."""
        count = stop - start
        return start + count * self.rank // self.size, start + count * (self.rank + 1) // self.size

    def broadcast(self, value: T) -> T:
        """Return the main process's value on every process."""
        if self.is_single_process:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control())
        return box[0]

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all processes in the order of their numbers, on the main process;
        None on others."""
        if self.is_single_process:
            return [value]
        box: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, box, dst=0, group=self._control())
        return box

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes in the order of their numbers, on every process."""
        if self.is_single_process:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value, group=self._control())
        return box

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Call a function on the main process, and return on every process what it returned there.

        Raises:
            PeerError: on other processes, where it raised on the main one; there, whatever it
                raised.
        """
        if self.is_single_process:
            return function()
        if not self.is_main:
            found, code, reason = self.broadcast((None, 0, ""))
            if reason:
                raise PeerError(reason, code)
            return found  # type: ignore[return-value]
        try:
            found = function()
        except Exception as error:
            code = error.exit_code if isinstance(error, PhasetrainError) else 1
            self.broadcast((None, code, f"{type(error).__name__}: {error}"))
            raise
        self.broadcast((found, 0, ""))
        return found

    def all_reduce_sum(self, count: Number) -> Number:
        """Return the sum of a count over all processes; all give a whole number, or all one with
        decimals."""
        if self.is_single_process:
            return count
        sum_of_all = torch.tensor(
            count, dtype=torch.int64 if isinstance(count, int) else torch.float64
        )
        dist.all_reduce(sum_of_all, group=self._control())
        return type(count)(sum_of_all)

    def all_reduce_max(self, value: float) -> float:
        """Return the largest of a number over all processes."""
        if self.is_single_process:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control())
        return float(found)

    def new_group(self) -> Any:
        """Return another group of all processes between CPUs, for a thread of its own; every
        process takes part."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))

    def _control(self) -> Any:
        assert self.control is not None, "these processes have not been joined into a group"
        return self.control
