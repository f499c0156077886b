"""The modes of modules and the parameters without gradient that hooks or a task have set."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn


class ModuleFlags:
    """Keeps `training` of modules and `requires_grad` of parameters, if anything but the config has
    changed them, so that a resume has them again.

    Args:
        modules: a module with all modules.
    """

    is_optional = True  # checkpoints of 0.1 lack it

    def __init__(self, modules: nn.Module) -> None:
        self._modules = dict(modules.named_modules())
        self._parameters = dict(modules.named_parameters())
        self._required = {name: p.requires_grad for name, p in self._parameters.items()}
        self._modes: dict[str, bool] = {}
        self._pending: Collection[str] = ()

    def begin_phase(self, *, fresh: bool) -> None:
        """Note the modes that the task has set; in a phase that is resumed, restore the others."""
        self._modes = {name: module.training for name, module in self._modules.items()}
        for name in () if fresh else self._pending:
            self._modules[name].training = not self._modes[name]
        self._pending = ()

    def state_dict(self) -> dict[str, list[str]]:
        """Return the names whose flag has changed."""
        flags = {
            "training": [
                name for name, mode in self._modes.items() if self._modules[name].training != mode
            ],
            "requires_grad": [
                name
                for name, flag in self._required.items()
                if self._parameters[name].requires_grad != flag
            ],
        }
        return {name: names for name, names in flags.items() if names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `requires_grad` and the modes; `begin_phase` sets the modes once more."""
        self._pending = state.get("training", ())
        for name, mode in self._modes.items():
            self._modules[name].training = mode != (name in self._pending)
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(
                self._required[name] != (name in state.get("requires_grad", ()))
            )
