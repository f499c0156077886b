"""What is written into a checkpoint, and what is read from one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from phasetrain.checkpoint.commit import Facts, Manifest

LEARNED = ("task.model.", "task.loss.")
"""How the names of tensors begin that make a checkpoint unhealthy where they hold what is no
number."""

Places = Callable[[dict[str, Any]], list[tuple[Tensor, Tensor]]]
"""Returns for tensors of a saved state, which have no content yet, the tensors into which they are
read."""


@dataclass(frozen=True)
class Crowd:
    """The processes that write a checkpoint together.

    Attributes:
        group: of torch's, used by the thread that writes and by nobody else.
        rank, size: number of this process, and of all.
    """

    group: Any
    rank: int
    size: int


@dataclass(frozen=True)
class Draft:
    """A checkpoint as it will be written: a standing copy of everything in it.

    Attributes:
        state: the position, see RunState.
        tensors: the file of tensors, which stays as it is until the next draft is made.
        texts: file name -> content of the others.
        facts: what is known of the weights.
        pieces: the tensors of which this process writes its piece, for their names and shapes
            alone; None where one process writes everything.
    """

    state: dict[str, Any]
    tensors: memoryview
    texts: Mapping[str, bytes]
    facts: Facts
    pieces: Mapping[str, Tensor] | None = None

    @property
    def size(self) -> int:
        """Bytes of all files that this process writes."""
        return self.tensors.nbytes + sum(map(len, self.texts.values()))


@dataclass(frozen=True)
class Loaded:
    """The content of one checkpoint.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        promised: what the run was promised when it was saved (config, plan, data, versions); to
            compare with.
        content: named states of what is learned and of the hooks, or what reads them.
    """

    path: str
    manifest: Manifest
    promised: dict[str, Any]
    content: dict[str, Any] | Callable[[Places | None], dict[str, Any]]

    @cached_property
    def state(self) -> dict[str, Any]:
        """Named states of what is learned and of the hooks, with all tensors whole.

        Raises:
            InvalidCheckpointError: a file was damaged since it was looked at.
        """
        return self.state_in(None)

    def state_in(self, places: Places | None) -> dict[str, Any]:
        """Return the same with some of the tensors read into others, which may be divided over
        processes.

        A checkpoint in one file has been read already; its tensors are whole.
        """
        if isinstance(self.content, dict):
            return self.content
        return self.content(places)
