"""Shared code of strategies that shard the optimizer's state by parameter."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.distributed import World
from phasetrain.distributed.strategies.state import StateAdapter, Target
from phasetrain.errors import ConfigError


class ShardedOptimizerState(StateAdapter):
    """State of an optimizer that contains an inner optimizer for this rank's parameters.

    A checkpoint holds the state of all parameters, as without sharding, so a run resumes from it
    under another strategy or world size.

    Args:
        world: the ranks.

    Attributes:
        parameters: all trained parameters, in order.
    """

    def __init__(self, world: World) -> None:
        self.parameters: list[nn.Parameter] = []
        self._world = world
        self._inner: Optimizer

    def attach(self, optimizer: Optimizer, inner: Optimizer) -> Optimizer:
        """Note the inner optimizer of `optimizer`, and return `optimizer`.

        Raises:
            ConfigError: it saves its state in a custom form.
        """
        # As in the optimizers of bitsandbytes: what is in `state` is not what they save and load,
        # so shards would not form the state that another strategy can resume from.
        if type(inner).state_dict is not Optimizer.state_dict:
            raise ConfigError(
                f"OPTIMIZER.name: {type(inner).__name__} saves its state in a form of its own, "
                "which strategies that shard the state of the optimizer cannot split and join; set "
                "DISTRIBUTED.strategy=ddp, or use another optimizer",
                code="config.conflict",
            )
        self._inner = inner
        self.parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        # The outer optimizer does not know the defaults, which schedules and summaries read.
        optimizer.defaults.update(inner.defaults)
        return optimizer

    def parameter_state(self, optimizer: Optimizer) -> Mapping[Tensor, Any]:
        """Return the state by parameter, for this rank's parameters."""
        return self._inner.state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all parameters on rank 0, nothing on others; a collective call."""
        numbers = self._parameter_numbers()
        local = {numbers[parameter]: state for parameter, state in self._inner.state.items()}
        parts = self._world.gather(local)
        if parts is None:
            return {}
        merged = {number: state for part in parts for number, state in part.items()}
        return {number: merged[number] for number in sorted(merged)}  # type: ignore[misc]

    def optimizer_entries(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: additions of an optimizer may belong to the shard of one rank."""
        return {}

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        state: Mapping[Any, Any],
        entries: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Load this rank's part of a state saved by `optimizer_state`, perhaps under another
        strategy."""
        by_number = {int(number): values for number, values in state.items()}
        mine = self._own_numbers()
        # The inner optimizer numbers its own parameters from 0.
        local = {index: by_number[n] for index, n in enumerate(mine) if n in by_number}
        super().load_optimizer_state(self._inner, local, entries)

    def local_optimizer_state(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the state of this rank's parameters."""
        mine = set(self._own_numbers())
        return {number: values for number, values in state.items() if int(number) in mine}

    def optimizer_targets(self, state: Mapping[Any, Any]) -> list[Target]:
        """Return the tensors of other ranks' parameters, which are not needed here."""
        mine = set(self._own_numbers())
        return [
            (saved, None)
            for number, values in state.items()
            if int(number) not in mine
            for saved in values.values()
            if isinstance(saved, Tensor)
        ]

    def _own_numbers(self) -> list[int]:
        """Return the numbers of the parameters that this rank updates."""
        numbers = self._parameter_numbers()
        return [
            numbers[parameter]
            for group in self._inner.param_groups
            for parameter in group["params"]
        ]

    def _parameter_numbers(self) -> dict[Tensor, int]:
        return {parameter: number for number, parameter in enumerate(self.parameters)}


def reject_mixed_dtypes(strategy: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Reject parameters of several dtypes, which cannot share a buffer.

    Args:
        strategy: its name, for the message.
        groups: parameter groups.

    Raises:
        ValueError: the parameters have several dtypes.
    """
    dtypes = {str(parameter.dtype) for group in groups for parameter in group["params"]}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(dtype.removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            f"DISTRIBUTED.strategy = {strategy!r}: the trained parameters have several dtypes "
            f"({listed}), and this strategy needs a single one; convert them, or set "
            "DISTRIBUTED.strategy=ddp"
        )


@contextmanager
def silence_import() -> Iterator[None]:
    """Suppress warnings of an import, and keep it from configuring the root logger."""
    # logging.warning() of a library adds a handler to a root logger that has none: give it one.
    root = logging.getLogger()
    placeholder = logging.NullHandler()
    root.addHandler(placeholder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(placeholder)
