"""Saving and loading the state of an updater and its optimizer bit for bit."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from phasetrain.distributed import Strategy
from phasetrain.optim.schedules.param_schedules import ParamSchedules
from phasetrain.optim.update.gradients import GradientPipeline
from phasetrain.optim.update.guard import NonFiniteGuard


class Ascent(Protocol):
    """Moves the weights up before the second gradient pass of an update, and back after it; the
    add-on optimizers has one."""

    def begin(self) -> None:
        """Begin an update."""
        ...

    def require_ascent(self) -> None:
        """Reject a task that has not made the second pass."""
        ...

    def climb(self, norm: Callable[[list[Tensor]], Tensor], *, reads: bool) -> bool:
        """Move the weights along their gradients; return whether they moved."""
        ...

    def descend(self) -> None:
        """Put weights and buffers back, bit for bit."""
        ...


MakeAscent = Callable[[Sequence[Tensor], Callable[[], Sequence[Tensor]]], Ascent]
"""Takes the trained parameters, and a function that returns the tensors that a forward pass
changes."""


class UpdaterState:
    """Values of an updater that others read, and its state in a checkpoint."""

    optimizer: Optimizer
    scaler: GradScaler | None
    schedules: ParamSchedules
    gradients: GradientPipeline
    guard: NonFiniteGuard
    strategy: Strategy
    lag: int
    names: tuple[str, ...]
    _initial_options: list[dict[str, Any]]
    _started: set[int]
    _used_lr: Any

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, as the last update used it; NaN if the
        optimizer has none."""
        return float("nan" if self._used_lr is None else self._used_lr)

    @property
    def factor(self) -> float:
        """Factor of all learning rates from the next update on, on top of their schedules.

        It is part of the state.
        """
        return self.schedules.factor

    @factor.setter
    def factor(self, value: float) -> None:
        """Multiply all learning rates by `value` from the next update on."""
        self.schedules.factor = value

    @property
    def waits(self) -> bool:
        """Whether each update waits for a device other than the CPU to report its verdict."""
        return self.guard.watches and not self.lag and self.gradients.device.type != "cpu"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that updates have accumulated.

        Options such as the learning rate belong to the config, unless the optimizer itself has
        changed them (a step size that it has found, say).

        Raises:
            NumericsError: the verdict on the last update was pending, and the run has to stop for
                it.
        """
        self.guard.resolve()
        # The optimizer's state goes through the strategy, which may have sharded it.
        state: dict[str, Any] = {
            "optimizer": self.strategy.state.optimizer_state(self.optimizer),
            "skipped": self.guard.skipped,
            "skipped_in_row": self.guard.in_row,
            "used_lr": self._used_lr,
        }
        if strides := list_strides(state["optimizer"], self.gradients.parameters):
            state["strides"] = strides
        options = changed_options(
            self._initial_options, self.optimizer.param_groups, self.schedules.options
        )
        if any(options):
            state["options"] = options
        # The state is numbered; a run that takes it over finds its weights by name.
        if self.names:
            state["names"] = list(self.names)
        if entries := self.strategy.state.optimizer_entries(self.optimizer):
            state["entries"] = entries
        # Left out if it is 1: a run that never changes it keeps the same checkpoint content.
        if self.schedules.factor != 1.0:
            state["factor"] = self.schedules.factor
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`; the counts of skipped updates may be missing."""
        # A pending verdict and the list of initialized weights belong to the state that is
        # replaced.
        self.guard.restart(state.get("skipped", 0), state.get("skipped_in_row", 0))
        self._started = set()
        # A hook may read it before the next update. Earlier checkpoints lack it.
        self._used_lr = state.get("used_lr", self._used_lr)
        factor = state.get("factor", 1.0)
        # The setter adds schedules for constant learning rates, which a run without a factor lacks.
        if factor != self.schedules.factor:
            self.schedules.factor = factor
        restore_strides(state["optimizer"], state.get("strides", ()))
        load_optimizer(
            self.strategy,
            self.optimizer,
            self.gradients.parameters,
            state["optimizer"],
            state.get("entries", {}),
        )
        # Looked up after loading: torch replaces the dicts in `param_groups`, and options written
        # to the old ones would silently have no effect.
        groups = self.optimizer.param_groups
        for group, options in zip(groups, state.get("options", ()), strict=False):
            group.update(options)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def load_optimizer_state(self, saved: Mapping[int, Any]) -> None:
        """Load the state of some parameters by their number, and drop the state of all others.

        Args:
            saved: number of the parameter -> its state, as in the `optimizer` of `state_dict`.
        """
        self._started = set()
        load_optimizer(self.strategy, self.optimizer, self.gradients.parameters, saved, {})


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
