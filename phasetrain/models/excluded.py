"""Frozen tensors of a model that checkpoints leave out, because the config can build them again
(CHECKPOINT.exclude)."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from phasetrain.errors import ConfigError
from phasetrain.models.digest import hash_state
from phasetrain.runtime.format import join_first

MAX_LISTED = 3
"""Maximum number of names in an error."""


class ExcludedTensors:
    """Tensors of a model that keep their initial values, and are in no checkpoint.

    Args:
        model: the model, with its initial values when `digests` is first read.
        names: names in its state_dict.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._model = model
        self._versions: dict[str, tuple[int, int]] = {}

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """Name -> SHA-256 of name, type, shape and bytes."""
        tensors = self._tensors()
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}
        return {name: hash_tensor(name, tensor) for name, tensor in tensors.items()}

    def remove_from(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the model without these tensors."""
        return {name: value for name, value in state.items() if name not in self.digests}

    def check_unchanged(self, *, fully: bool = False) -> None:
        """Check that all tensors have their initial values.

        Args:
            fully: compare all bits. Otherwise only the bits of tensors to which PyTorch has seen a
                write, which takes microseconds.

        Raises:
            ConfigError: one has changed.
        """
        changed = []
        for name, tensor in self._tensors().items():
            digest = self.digests[name]
            version = _version(tensor)
            if not fully and version == self._versions[name]:
                continue
            # DistributedDataParallel writes buffers that stay the same.
            if hash_tensor(name, tensor) != digest:
                changed.append(name)
            self._versions[name] = version
        if changed:
            raise ConfigError(
                f"CHECKPOINT.exclude: the training has changed {join_first(changed, MAX_LISTED)}, "
                "although MODEL.freeze freezes it; checkpoints may leave out tensors only that "
                "stay as they are; remove it from CHECKPOINT.exclude",
                code="checkpoint.excluded_changed",
            )

    def _tensors(self) -> dict[str, Tensor]:
        state = self._model.state_dict()
        return {name: state[name] for name in self.names}


def hash_tensor(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 of name, type, shape and bytes of a tensor."""
    return hash_state({name: tensor})


def _version(tensor: Tensor) -> tuple[int, int]:
    # The counter that autograd uses to detect writes in place; private API of torch.
    return tensor.data_ptr(), tensor._version
