"""The state of a task over all processes: what a checkpoint holds of it, and taking that over."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from phasetrain.data import BadSamples
from phasetrain.distributed import Strategy, load_buffers
from phasetrain.errors import ChangedError, is_out_of_memory
from phasetrain.meters import Meter
from phasetrain.tasks.parts import Stateful

MODULES = ("model", "loss", "ema", "swa")
"""Names of what is trained, whose state depends on the strategy."""


class WholeState(ABC):
    """Saves and restores everything that `stateful` names."""

    _strategy: Strategy

    @abstractmethod
    def stateful(self) -> dict[str, Stateful]:
        """Return everything that learns or accumulates, by the name it has in a checkpoint."""

    def whole_state(self) -> dict[str, Any]:
        """Return the state of everything in `stateful`, by name; every process takes part."""
        strategy = self._strategy
        return {
            name: strategy.state.model_state(part)
            if name in MODULES and isinstance(part, nn.Module)
            else part.state_dict()
            for name, part in self.stateful().items()
        }

    def load_whole_state(self, learned: Mapping[str, Any]) -> None:
        """Take over what `whole_state` returned, perhaps with another number of processes.

        Raises:
            ChangedError: there is a part of which it knows nothing, or one of another shape.
        """
        # Bad samples are counted from here on where a resume is the first to put up with them.
        parts = {
            name: part
            for name, part in self.stateful().items()
            if name in learned or name[:5] != "data."
        }
        _load(parts, learned, self._strategy)

    def load_modules(self, learned: Mapping[str, Any]) -> None:
        """Take over what `whole_state` returned of the modules alone: weights and buffers, averages
        of them too.

        Raises:
            ChangedError: there is a module of which it knows nothing, or one of another shape.
        """
        parts = {name: part for name, part in self.stateful().items() if name in MODULES}
        _load(parts, learned, self._strategy)

    @property
    def divides(self) -> bool:
        """Whether each process has a piece of each weight, and saves it."""
        return self._strategy.shards_weights

    def own_state(self) -> dict[str, Any]:
        """Return what this one of several processes has for itself: buffers, sums of meters, bad
        samples met."""
        modules = {
            name: part for name, part in self.stateful().items() if isinstance(part, nn.Module)
        }
        found: dict[str, Any] = {name: dict(part.named_buffers()) for name, part in modules.items()}
        bad = {
            name: part.state_dict()
            for name, part in self.stateful().items()
            if name.startswith("data.")
        }
        return {name: state for name, state in (found | bad).items() if state}

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Take over what `own_state` returned."""
        stateful = self.stateful()
        for name in own.keys() & stateful.keys():
            part = stateful[name]
            if isinstance(part, Meter):
                part.load_buffers(own[name])
            elif isinstance(part, nn.Module):
                load_buffers(part, own[name])
            else:
                part.load_state_dict(own[name])

    def load_merged_state(self, owns: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Take over what another number of processes had: the main one gets the sums of all, others
        begin at zero."""
        for name, part in self.stateful().items():
            found = [own[name] for own in owns if name in own]
            if isinstance(part, Meter):
                if not is_main:
                    part.reset()
                elif found:
                    part.merge_buffers(found)
            elif isinstance(part, BadSamples) and found:
                met = {index: reason for one in found for index, reason in one["samples"]}
                part.load_state_dict({"samples": [[index, met[index]] for index in sorted(met)]})


def _load(parts: Mapping[str, Stateful], learned: Mapping[str, Any], strategy: Strategy) -> None:
    """Give parts their states by name."""
    for name in parts.keys() - learned.keys():
        raise ChangedError(
            f"it has no state of {name!r}; it was made by another version of the task"
        )
    for name, part in parts.items():
        try:
            if name in MODULES and isinstance(part, nn.Module):
                strategy.state.load_model_state(part, learned[name])
            else:
                part.load_state_dict(learned[name])
        except (RuntimeError, ValueError, KeyError) as error:
            if is_out_of_memory(error):
                raise
            raise ChangedError(f"the state of {name!r} does not fit this run: {error}") from error


def is_ours(name: str) -> bool:
    """Tell whether an entry of `stateful` is one that passes without an update leave alone, but for
    buffers."""
    return name in (*MODULES, "updater") or name.startswith(("meter.", "data."))
