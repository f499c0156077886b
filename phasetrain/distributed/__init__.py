"""The processes of a run and how they share its work (section DISTRIBUTED)."""

from dataclasses import dataclass

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process, from 0; process 0 is the main one.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once per run."""
        return self.rank == 0

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """Return this process's slice of the global batch [start, stop): contiguous, even to within one sample."""
        count = stop - start
        return start + count * self.rank // self.size, start + count * (self.rank + 1) // self.size
