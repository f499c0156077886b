"""The content of a checkpoint, before it is written and after it was read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from phasetrain.checkpoint.codec import assemble_state
from phasetrain.checkpoint.commit import Facts, Manifest, Saved
from phasetrain.checkpoint.snapshot import NamedTensors
from phasetrain.distributed.strategies.state import Target
from phasetrain.runtime.storage import FileRecord, Storage

FORK = "fork"
"""Entry of promised.json in a forked checkpoint: where it comes from, and whether the next command
may have any config."""

WEIGHT_PREFIXES = ("task.model.", "task.loss.")
"""Prefixes of the tensors that make a checkpoint unhealthy if they contain NaN."""

FindTargets = Callable[[dict[str, Any]], list[Target]]
"""Takes a state with empty tensors, and returns targets for some of them."""

DescribeFiles = Callable[[dict[str, FileRecord], bool], Manifest]
"""Makes the manifest from the records of files, and from whether the weights are healthy."""


@dataclass(frozen=True)
class Draft:
    """A copy of everything in a checkpoint, to be written while training continues.

    Attributes:
        state: the position in the run, see RunState.
        tensors: content of the tensor file; overwritten when the next draft is made.
        texts: file name -> content of the other files.
        facts: facts about the weights.
        shards: tensors whose shard this rank writes, for their names and shapes only;
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


def read_with_targets(
    tree: bytes | bytearray,
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    find_targets: FindTargets | None,
    read_into: Callable[[dict[str, Tensor]], None],
) -> Any:
    """Return a state whose tensors are read into the targets that are chosen for them.

    Args:
        tree: the state as JSON.
        layout: name -> shape and dtype of each tensor.
        find_targets: see `FindTargets`; a tensor without a target is read into a new one, and one
            that is not needed stays on the meta device.
        read_into: fills tensors by name.
    """
    # On the meta device, tensors have a shape and an identity, and take no memory.
    empty = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in layout.items()
    }
    chosen: dict[int, Tensor | None] = {}
    if find_targets is not None:
        pairs = find_targets(assemble_state(tree, empty))
        chosen = {id(saved): target for saved, target in pairs}
    targets: dict[str, Tensor] = {}
    for name, placeholder in empty.items():
        target = chosen.get(id(placeholder), placeholder)
        if target is placeholder:
            targets[name] = torch.empty(placeholder.shape, dtype=placeholder.dtype)
        elif target is not None:
            targets[name] = target
    read_into(targets)
    return assemble_state(tree, {**empty, **targets})


class JointWriter(Protocol):
    """The ranks that write a checkpoint together, each its shards of the weights.

    The add-on `sharding` has it.
    """

    def select_tensors(self, tensors: NamedTensors) -> dict[str, Tensor]:
        """Return the tensors of a state whose shard this rank writes."""
        ...

    def commit(
        self,
        storage: Storage,
        root: str,
        draft: Draft,
        describe: DescribeFiles,
        *,
        give_up: Callable[[], bool],
        before: Callable[[], None],
    ) -> Saved | None:
        """Commit a checkpoint; a collective call, from a thread.

        Args:
            storage: file access.
            root: folder of the checkpoints.
            draft: this rank's part.
            describe: makes the manifest; called on rank 0.
            give_up: polled between operations; True stops the write.
            before: called on rank 0 before anything is written.

        Returns:
            The checkpoint on rank 0, else None.

        Raises:
            OSError, SaveError: it failed on one rank, perhaps another one; no trace of it is left.
            Unfinished: it was given up on one rank; no trace of it is left.
            RuntimeError: another rank is gone.
        """
        ...


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
        """Return the states, with some of the tensors read into others, such as a model's.

        Args:
            find_targets: chooses the tensors; None: all are read into new ones.

        Raises:
            InvalidCheckpointError: a file was damaged after it had been verified.
        """
        if isinstance(self.content, dict):  # it was read as a whole
            return self.content
        return self.content(find_targets)


def is_forked(loaded: LoadedCheckpoint) -> bool:
    """Return whether a checkpoint was forked, and its run has saved none since."""
    return FORK in loaded.promised
