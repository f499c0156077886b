"""Saving and loading the state of an optimizer bit for bit."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phasetrain.distributed import Strategy


def load_optimizer(
    strategy: Strategy,
    optimizer: Optimizer,
    trained: Sequence[Tensor],
    saved: Mapping[Any, Any],
    entries: Mapping[str, Any],
) -> None:
    """Load the state of an optimizer with the dtypes and the memory layout that it was saved with.

    Args:
        strategy: how ranks share the optimizer.
        optimizer: optimizer that gets the state.
        trained: its parameters in order.
        saved: state by number of parameter, as `Strategy.state.optimizer_state` returns it.
        entries: further entries of its state_dict.
    """
    # Kept because `load_state_dict` casts: the saved values are needed again below.
    own = strategy.state.local_optimizer_state(saved)
    strategy.state.load_optimizer_state(optimizer, own, entries)
    states = strategy.state.parameter_state(optimizer)
    for number, values in own.items():
        if not str(number).isdecimal():
            continue  # a custom optimizer keeps something under another key
        parameter = trained[int(number)]
        state = states.get(parameter, {})
        for name, value in values.items():
            loaded = state.get(name)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            if loaded.shape != value.shape:
                continue  # the optimizer has converted it
            # torch's load_state_dict takes over the given tensors: saved values that have their own
            # memory in the right layout are kept, without another copy.
            is_kept = loaded is value and _owns_memory(value)
            if value.shape == parameter.shape:
                # Fused kernels walk raw memory: momentum has to be laid out as its parameter is
                # (channels_last, say).
                if not is_kept or value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            elif loaded.dtype != value.dtype or not is_kept:
                # torch casts state to the dtype of the parameter, which may be coarser.
                state[name] = value.to(loaded.device, copy=True)


def list_strides(
    state: Mapping[Any, Any], trained: Sequence[Tensor]
) -> list[tuple[int, list[str | int], list[int]]]:
    """Return number of the parameter, path and strides of each tensor of an optimizer's state that
    is not contiguous.

    Checkpoints hold contiguous tensors, and matrix products with a matrix and with its transposed
    copy differ in the last bits: eigenvectors of SOAP, for example. Tensors that are laid out as
    their parameter are not listed, because `load_optimizer` lays them out.

    Args:
        state: state by number of parameter.
        trained: parameters of the optimizer in order.
    """
    return [
        (int(number), path, list(tensor.stride()))
        for number, values in state.items()
        if str(number).isdecimal()
        for path, tensor in _list_tensors(values, [])
        if not (len(path) == 1 and tensor.shape == trained[int(number)].shape)
        and not tensor.is_contiguous()
        # What overlaps or has gaps cannot be allocated with its strides.
        and torch.empty_like(tensor).stride() == tensor.stride()
    ]


def restore_strides(
    state: Mapping[Any, Any], strides: Sequence[tuple[int, Sequence[str | int], Sequence[int]]]
) -> None:
    """Lay out tensors of a state as `list_strides` has found them, in place."""
    for number, path, stride in strides:
        # All ranks have the list, and with a sharded optimizer a part of the state.
        inner: Any = state.get(number, state.get(str(number)))
        if inner is None:
            continue
        for key in path[:-1]:
            inner = inner[key]
        value = inner[path[-1]]
        inner[path[-1]] = torch.empty_strided(
            value.shape, tuple(stride), dtype=value.dtype, device=value.device
        ).copy_(value)


def _list_tensors(value: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], Tensor]]:
    """Yield the tensors in nested dicts and lists with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _list_tensors(item, [*path, key])
    elif isinstance(value, list):  # a tuple could not be changed in place
        for index, item in enumerate(value):
            yield from _list_tensors(item, [*path, index])


def _owns_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is all that is in its memory: a view would keep the content of a
    whole file in memory."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def changed_options(
    initial: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    scheduled: Collection[tuple[int, str]],
) -> list[dict[str, Any]]:
    """Return the options of each group that the optimizer itself has added or changed.

    Args:
        initial: options of the groups when they were created.
        groups: the groups as they are now.
        scheduled: number of a group and option, for each option that a schedule sets.
    """
    return [
        {
            name: value
            for name, value in group.items()
            if name != "params"
            and (number, name) not in scheduled
            and not (name in first and _is_same(first[name], value))
        }
        for number, (first, group) in enumerate(zip(initial, groups, strict=True))
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return type(one) is type(other) and bool(one == other)
