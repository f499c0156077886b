"""Buffers of modules, looked up by their places: a module may change one, or put another tensor in
its place."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[dict[str, Tensor | None], str]
"""The buffers of one module, and the name of one of them."""


def find_buffers(*modules: nn.Module) -> list[Place]:
    """Return where modules and their parts keep their buffers."""
    return [
        (part._buffers, name)
        for module in modules
        for part in module.modules()
        for name in part._buffers
    ]


def buffer_lookup(*modules: nn.Module) -> Callable[[], list[Tensor]]:
    """Return what looks the buffers of modules up."""
    found = find_buffers(*modules)
    return lambda: [buffer for buffers, name in found if (buffer := buffers.get(name)) is not None]


def load_buffers(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Give a module buffers by their names, those among them that it has."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])


class BufferSnapshot:
    """The buffers of modules as they are now, to be put back: the same tensors, with the same
    content."""

    def __init__(self, *modules: nn.Module) -> None:
        self._kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (buffers, name, buffer, buffer.detach().clone())
            for buffers, name in find_buffers(*modules)
            if (buffer := buffers.get(name)) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for buffers, name, buffer, content in self._kept:
            buffers[name] = buffer
            buffer.copy_(content)
