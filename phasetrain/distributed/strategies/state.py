"""How the state of a model and its optimizer is read for a checkpoint and loaded again."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.distributed.dtensors import is_dtensor

Target = tuple[Tensor, Tensor | None]
"""A saved tensor, and the tensor it is read into, or None."""

STANDARD_ENTRIES = ("state", "param_groups")
"""Entries of the state_dict of every optimizer."""


class StateAdapter:
    """Reads and loads the state of modules and optimizers in a form all strategies share.

    Weights are named as in the module, the state of the optimizer is numbered by parameter, so a
    checkpoint saved under one strategy loads under another. This class is for ranks that hold
    everything; subclasses gather or shard.
    """

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a module as it is checkpointed; a collective call."""
        return module.state_dict()

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a state saved by `model_state`, perhaps under another strategy."""
        module.load_state_dict(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by number of parameter; a collective call."""
        state: dict[str, Any] = optimizer.state_dict()["state"]
        return state

    def optimizer_entries(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the additions of a custom optimizer to its state_dict, by name."""
        entries: dict[str, Any] = optimizer.state_dict()
        return {name: value for name, value in entries.items() if name not in STANDARD_ENTRIES}

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        state: Mapping[Any, Any],
        entries: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Load a state saved by `optimizer_state`, perhaps under another strategy.

        Args:
            optimizer: optimizer that gets the state.
            state: state by number of parameter.
            entries: result of `optimizer_entries`.
        """
        # Options of the groups are kept: they come from the config, which may have changed.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({**entries, "state": dict(state), "param_groups": groups})

    def parameter_state(self, optimizer: Optimizer) -> Mapping[Tensor, Any]:
        """Return the state by parameter, for the parameters that this rank updates."""
        return optimizer.state

    def local_optimizer_state(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the part of a saved optimizer state that this rank holds."""
        return state

    def model_targets(self, module: nn.Module, state: Mapping[str, Any]) -> list[Target]:
        """Return pairs of a saved tensor and the tensor this rank reads it into.

        A saved tensor without a pair is read whole; one with None is not needed here.
        """
        own = dict(list_plain_tensors(module, ""))
        return [
            (saved, own[name])
            for name, saved in state.items()
            if isinstance(saved, Tensor)
            and name in own
            and not is_dtensor(own[name])
            and (saved.shape, saved.dtype) == (own[name].shape, own[name].dtype)
        ]

    def optimizer_targets(self, state: Mapping[Any, Any]) -> list[Target]:
        """Return such pairs for the state of the optimizer."""
        return []


def list_plain_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module that its load_state_dict only copies, by name."""
    module_class = type(module)
    # Whoever replaces or prepares the loading may look at the old value while it has the new one.
    if (
        module_class.load_state_dict is not nn.Module.load_state_dict
        or module_class._load_from_state_dict is not nn.Module._load_from_state_dict
        or module._load_state_dict_pre_hooks
    ):
        return
    saved = module._parameters | {
        name: buffer
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    for name, tensor in saved.items():
        if tensor is not None:
            yield f"{prefix}{name}", tensor
    for name, child in module.named_children():
        yield from list_plain_tensors(child, f"{prefix}{name}.")
