"""What an optimizer has accumulated, and how it takes it back with the same bits."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phasetrain.distributed import Strategy


def take_over(
    strategy: Strategy, optimizer: Optimizer, trained: Sequence[Tensor], saved: Mapping[Any, Any]
) -> None:
    """Give an optimizer a state by number of parameter, with the types and the layout in memory
    that it had.

    Args:
        strategy: how processes share the optimizer.
        optimizer: takes the state.
        trained: its parameters in order.
        saved: what `Strategy.state.optimizer_state` returned.
    """
    own = strategy.state.local_optimizer_state(saved)
    strategy.state.load_optimizer_state(optimizer, own)
    held = strategy.state.parameter_state(optimizer)
    for number, values in own.items():
        parameter = trained[int(number)]
        kept = held.get(parameter, {})
        for name, value in values.items():
            now = kept.get(name)
            if (
                not isinstance(value, Tensor)
                or not isinstance(now, Tensor)
                or now.shape != value.shape
            ):
                continue  # no tensor, or the optimizer has made something else of it
            if value.shape == parameter.shape:
                # Fused kernels walk raw memory: momentum has to lie as its parameter does
                # (channels_last, say).
                kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            elif (
                now.dtype != value.dtype
            ):  # torch gives it the type of the parameter, which may be coarser
                kept[name] = value.to(now.device, copy=True)


def changed(
    firsts: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    scheduled: Collection[tuple[int, str]],
) -> list[dict[str, Any]]:
    """Return the options of each group that were set or changed since it was made, by nobody but
    the optimizer.

    Args:
        firsts: options of the groups when they were made.
        groups: as they are now.
        scheduled: numbers of groups, and options that a schedule sets there.
    """
    return [
        {
            name: value
            for name, value in group.items()
            if name != "params"
            and (number, name) not in scheduled
            and not (name in first and _same(first[name], value))
        }
        for number, (first, group) in enumerate(zip(firsts, groups, strict=True))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
