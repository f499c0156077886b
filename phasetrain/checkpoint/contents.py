"""The content of a checkpoint, before it is written and after it was read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from phasetrain.checkpoint.commit import Facts, Manifest

WEIGHT_PREFIXES = ("task.model.", "task.loss.")
"""Prefixes of the tensors that make a checkpoint unhealthy if they contain NaN."""

FindTargets = Callable[[dict[str, Any]], list[tuple[Tensor, Tensor]]]
"""Takes a state with empty tensors, and returns pairs of one of them and its target tensor."""


@dataclass(frozen=True)
class SaveGroup:
    """The ranks that write a sharded checkpoint together.

    Attributes:
        group: process group, used only by the thread that writes.
        rank: rank of this process.
        size: world size.
    """

    group: Any
    rank: int
    size: int


@dataclass(frozen=True)
class Draft:
    """A copy of everything in a checkpoint, to be written while training continues.

    Attributes:
        state: the position in the run, see RunState.
        tensors: content of the tensor file; overwritten when the next draft is made.
        texts: file name -> content of the other files.
        facts: facts about the weights.
        shards: the tensors of which this rank writes its shard, for their names and shapes only;
            None if one rank writes everything.
    """

    state: dict[str, Any]
    tensors: memoryview
    texts: Mapping[str, bytes]
    facts: Facts
    shards: Mapping[str, Tensor] | None = None

    @property
    def size(self) -> int:
        """Total bytes of the files that this rank writes."""
        return self.tensors.nbytes + sum(map(len, self.texts.values()))


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of one checkpoint.

    Attributes:
        path: its folder.
        manifest: its manifest.
        promised: facts that must not change before a resume (config, plan, data, versions).
        content: named states of the task and of hooks, or a function that reads them.
    """

    path: str
    manifest: Manifest
    promised: dict[str, Any]
    content: dict[str, Any] | Callable[[FindTargets | None], dict[str, Any]]

    @cached_property
    def state(self) -> dict[str, Any]:
        """Named states of the task and of hooks, with whole tensors.

        Raises:
            InvalidCheckpointError: a file was damaged after it had been verified.
        """
        return self.read_state(None)

    def read_state(self, find_targets: FindTargets | None) -> dict[str, Any]:
        """Return the states, with some of the tensors read into others, such as DTensors.

        The tensors of a checkpoint in one file have been read already and are whole.
        """
        if isinstance(self.content, dict):  # one file, which had to be read as a whole anyway
            return self.content
        return self.content(find_targets)
