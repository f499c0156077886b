"""What strategies have in common that let each process keep the optimizer's state of some
parameters only."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.distributed.strategies.base import Strategy


class ShardedState(Strategy):
    """The optimizer of all parameters has one within it, of those that are this process's own.

    A checkpoint holds the state of all, by number of parameter: the same as without shards. So a
    run goes on from it under another strategy, and with another number of processes.
    """

    shards = True
    _inner: Optimizer
    _parameters: list[nn.Parameter]

    def kept(self, optimizer: Optimizer) -> Mapping[Tensor, Any]:
        """Return what the optimizer keeps of this process's own parameters."""
        return self._inner.state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all parameters on the main process, nothing on others; every process
        takes part."""
        numbers: dict[Tensor, int] = {
            parameter: number for number, parameter in enumerate(self._parameters)
        }
        own = {numbers[parameter]: _on_cpu(state) for parameter, state in self._inner.state.items()}
        parts = self.world.gather(own)
        if parts is None:
            return {}
        whole = {number: state for part in parts for number, state in part.items()}
        return {number: whole[number] for number in sorted(whole)}  # type: ignore[misc]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        """Take this process's part of what `optimizer_state` returned, perhaps under another
        strategy."""
        whole = {int(number): kept for number, kept in state.items()}
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        mine = [
            numbers[parameter]
            for group in self._inner.param_groups
            for parameter in group["params"]
        ]
        part = {place: whole[number] for place, number in enumerate(mine) if number in whole}
        super().load_optimizer_state(self._inner, part)

    def _divided(self, optimizer: Optimizer, inner: Optimizer) -> Optimizer:
        """Note what the inner optimizer of `optimizer` is, and let its defaults be known
        outside."""
        self._inner = inner
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        optimizer.defaults.update(inner.defaults)
        return optimizer


def refuse_types(strategy: str, parameters: Iterable[Any]) -> None:
    """Refuse parameters of several types, which do not lie in one buffer.

    Args:
        strategy: its name, for the message.
        parameters: to train, or groups of them.

    Raises:
        ValueError: there are.
    """
    found = [one["params"] if isinstance(one, Mapping) else [one] for one in parameters]
    types = sorted(
        {str(parameter.dtype).removeprefix("torch.") for group in found for parameter in group}
    )
    if len(types) > 1:
        raise ValueError(
            f"DISTRIBUTED.strategy = {strategy!r}: the trained parameters are of several types ({', '.join(types)}), "
            "and it needs one; make them alike, or set DISTRIBUTED.strategy=ddp"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings of an import to itself, and from making a handler of its own for the log of the
    whole process."""
    root = logging.getLogger()
    nowhere = logging.NullHandler()
    root.addHandler(nowhere)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(nowhere)


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {name: _on_cpu(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_on_cpu(value) for value in state)
    return state
