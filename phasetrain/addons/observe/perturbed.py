"""Outputs of a model and states of a loss as they may be later in a training."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.runtime.nested import map_tensors

CALLS = 2
"""Calls in training mode that move the state of a loss, such as a multiplier that starts at 0."""


def perturb_tensors(value: Any, generator: torch.Generator) -> Any:
    """Return floating-point tensors with noise in proportion to their scale, which rises from row
    to row, so that the losses of samples differ.

    Numbers in [0, 1], such as probabilities, stay there, and tensors of one sign keep it.

    Args:
        value: tensors, nested in any form; those of other numbers are kept.
        generator: draws the noise, on the CPU.
    """

    def perturb(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        rows = len(tensor) if tensor.ndim else 1
        shape = [rows, *[1] * (tensor.ndim - 1)] if tensor.ndim else []
        rising = (torch.arange(1.0, rows + 1) / rows).reshape(shape).to(tensor)
        low, high = float(tensor.min()), float(tensor.max())
        if low == high == 0:
            return 2 * rising * noise
        if low >= 0 and high <= 1:
            return tensor + rising * (noise - tensor)
        if low >= 0 or high <= 0:
            return tensor * (1 + rising * (noise - 0.5))
        return tensor + 4 * tensor.std() * rising * (noise - 0.5)

    return map_tensors(value, perturb)


def perturb_loss(
    loss: nn.Module,
    call: Callable[[nn.Module], Any],
    where: float,
    updates: int,
    generator: torch.Generator,
) -> nn.Module:
    """Return a copy of a loss with the state of a later update.

    Its methods `advance` are called, and the loss itself in training mode, so that values that
    follow the training are no longer those of the start. Parameters, and the buffers that these
    calls change, get noise.

    Args:
        loss: the loss, which stays as it is.
        call: calls a loss with outputs and targets.
        where: progress of the training for `advance`.
        updates: updates before the later one.
        generator: draws the noise, on the CPU.
    """
    later = deepcopy(loss).train()
    for module in later.modules():
        advance = getattr(module, "advance", None)
        if callable(advance):
            advance(where, updates)
    with torch.no_grad():
        for _ in range(CALLS):
            call(later)
        before = dict(loss.named_buffers())
        changed = [
            buffer for name, buffer in later.named_buffers() if not _is_equal(buffer, before[name])
        ]
        for tensor in (*later.parameters(), *changed):
            tensor.copy_(perturb_tensors(tensor.detach(), generator))
    return later


def _is_equal(buffer: Tensor, before: Tensor) -> bool:
    return buffer.shape == before.shape and torch.equal(buffer, before)
