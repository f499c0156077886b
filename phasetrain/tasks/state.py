"""Saving and restoring the state of a task over all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from torch import nn

from phasetrain.distributed import Strategy, World, load_buffers
from phasetrain.distributed.strategies.state import Target
from phasetrain.errors import ChangedError, is_out_of_memory
from phasetrain.models.excluded import ExcludedTensors
from phasetrain.optim import Updater
from phasetrain.tasks.shape_errors import shorten_shape_error

What = Literal["everything", "learned", "computed"]
"""Parts of a task: all, those without updaters and `PerRank` parts, or those that a step computes,
which are all but the positions in the data."""


class Stateful(Protocol):
    """Anything whose state belongs in a checkpoint.

    A module is saved and restored through the strategy, which may have sharded its weights; its
    buffers may differ between ranks. The state of any other part is the same on every rank, unless
    the part is `PerRank`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, text, lists, tuples and dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Load the result of `state_dict`."""
        ...


@runtime_checkable
class PerRank(Protocol):
    """A stateful part that each rank accumulates from its own samples."""

    @property
    def is_optional(self) -> bool:
        """Whether a checkpoint without this part can be resumed; the part then starts empty."""
        ...

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank."""
        ...

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `rank_state`."""
        ...

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Load the states of a run with another world size.

        Args:
            states: the state of each of its ranks, if any.
            is_main: whether this is rank 0, which takes sums; the other ranks start from zero.
        """
        ...


@dataclass(frozen=True)
class SavedTask:
    """State of a task in a checkpoint.

    Attributes:
        shared: result of `TaskState.shared_state`.
        ranks: result of `TaskState.rank_state` of each rank; empty for a single process.
    """

    shared: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]] = ()


class TaskState(ABC):
    """Saves and restores all parts in `stateful`."""

    excluded: ExcludedTensors | None = None
    """Tensors of the model that checkpoints leave out."""

    _strategy: Strategy
    _world: World

    @abstractmethod
    def stateful(self) -> dict[str, Stateful]:
        """Return every part that learns or accumulates, by its name in a checkpoint."""

    @property
    def shards_weights(self) -> bool:
        """Whether each rank holds and saves a shard of each weight."""
        return self._strategy.shards_weights

    def shared_state(self, what: What = "everything") -> dict[str, Any]:
        """Return the state of parts by name; all ranks must call this."""
        state = self._strategy.state
        return {
            name: state.model_state(part) if _is_module(part) else part.state_dict()
            for name, part in _select_parts(self.stateful(), what).items()
        }

    def rank_state(self, what: What = "everything") -> dict[str, Any]:
        """Return the state that only this rank has: buffers, sums of meters, bad samples."""
        states: dict[str, Any] = {}
        for name, part in _select_parts(self.stateful(), what).items():
            if isinstance(part, PerRank):
                states[name] = part.rank_state()
            elif isinstance(part, nn.Module):
                # Running statistics come from each rank's own samples, unlike weights, which are
                # shared.
                states[name] = dict(part.named_buffers())
        return {name: state for name, state in states.items() if state}

    def module_names(self) -> list[str]:
        """Return the names of parts whose weights all ranks share, and whose buffers may differ."""
        return [name for name, part in self.stateful().items() if _is_module(part)]

    def restore(self, saved: SavedTask, what: What = "everything") -> None:
        """Load the state of a checkpoint, which may come from another strategy or world size.

        With the same world size, each rank gets its own state back. Otherwise rank 0 gets the
        merged sums of all ranks, and every rank the buffers of rank 0.

        Args:
            saved: state to load.
            what: the parts to load; others are left alone.

        Raises:
            ChangedError: the task has a part that the checkpoint lacks, or that has another shape.
        """
        parts = _select_parts(self.stateful(), what)
        _load_shared(parts, saved.shared, self._strategy)
        ranks = saved.ranks
        if ranks and len(ranks) == self._world.size:
            _load_rank(parts, ranks[self._world.rank])
        elif ranks or not self._world.is_main:
            for name, part in parts.items():
                if isinstance(part, PerRank):
                    # Sums of meters go to rank 0 alone: they are added over ranks at the end, so a
                    # copy on each rank would count them several times.
                    states = [rank_state[name] for rank_state in ranks if name in rank_state]
                    part.merge_rank_states(states, is_main=self._world.is_main)

    def restore_targets(self, shared: Mapping[str, Any]) -> list[Target]:
        """Return pairs of a saved tensor and the tensor into which this rank reads it, or None.

        Saved tensors that are not in the list are read whole into new ones.
        """
        targets: list[Target] = []
        state = self._strategy.state
        for name, part in self.stateful().items():
            saved = shared.get(name, {})
            if isinstance(part, Updater):
                targets += state.optimizer_targets(saved.get("optimizer", {}))
            elif _is_module(part):
                targets += state.model_targets(part, saved)
        return targets


def _is_module(part: object) -> TypeGuard[nn.Module]:
    return isinstance(part, nn.Module) and not isinstance(part, PerRank)


def _select_parts(parts: dict[str, Stateful], what: What) -> dict[str, Stateful]:
    if what == "learned":
        return {
            name: part for name, part in parts.items() if not isinstance(part, Updater | PerRank)
        }
    if what == "computed":
        return {name: part for name, part in parts.items() if not name.startswith("data.")}
    return parts


def _load_shared(
    parts: Mapping[str, Stateful], shared: Mapping[str, Any], strategy: Strategy
) -> None:
    for name, part in parts.items():
        if name not in shared:
            if getattr(part, "is_optional", False):
                continue
            raise ChangedError(
                f"it has no state of {name!r}; it was made by another version of the task",
                code="resume.missing_part",
            )
        try:
            if _is_module(part):
                strategy.state.load_model_state(part, shared[name])
            else:
                part.load_state_dict(shared[name])
        except (RuntimeError, ValueError, KeyError) as error:
            # An error of the machine, not of the checkpoint: it must not be reported as a changed
            # config.
            if is_out_of_memory(error):
                raise
            raise ChangedError(
                f"the state of {name!r} does not fit this run: {shorten_shape_error(error)}",
                code="resume.part_changed",
            ) from error


def _load_rank(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    for name in state.keys() & parts.keys():
        part = parts[name]
        if isinstance(part, PerRank):
            part.load_rank_state(state[name])
        elif isinstance(part, nn.Module):
            load_buffers(part, state[name])
