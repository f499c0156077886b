"""Buffers of modules, addressed by module and name.

A module may update a buffer in place or assign a new tensor to it, so a reference to the tensor
itself can go stale.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BufferSlot = tuple[dict[str, Tensor | None], str]
"""The dict of a module's buffers, and the name of one of them."""


def find_buffers(*modules: nn.Module) -> list[BufferSlot]:
    """Return the slots of all buffers of modules and their submodules."""
    # nn.Module has no public way to reach the dict itself, and named_buffers() yields tensors.
    return [
        (part._buffers, name)
        for module in modules
        for part in module.modules()
        for name in part._buffers
    ]


def buffer_lookup(*modules: nn.Module) -> Callable[[], list[Tensor]]:
    """Return a function that returns the current buffers of modules."""
    slots = find_buffers(*modules)
    return lambda: [buffer for buffers, name in slots if (buffer := buffers.get(name)) is not None]


def load_buffers(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy values into the buffers of a module; names it does not have are ignored."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])


class BufferSnapshot:
    """The buffers of modules at one moment, to restore later: both the tensors and their content.

    Args:
        modules: the modules to snapshot.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._saved: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (buffers, name, buffer, buffer.detach().clone())
            for buffers, name in find_buffers(*modules)
            if (buffer := buffers.get(name)) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the tensors back and copy their content into them."""
        # The same tensor objects: a compiled graph or DDP may hold references to them.
        for buffers, name, buffer, content in self._saved:
            buffers[name] = buffer
            buffer.copy_(content)
