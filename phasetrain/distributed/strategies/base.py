"""What a strategy decides, and the strategy of a single process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from phasetrain.config.registry import Registry
from phasetrain.distributed.world import World

Groups = list[dict[str, Any]]
"""Groups of trained parameters as optimizers of torch take them: `params` and options."""

MakeOptimizer = Callable[[Groups], Optimizer]
"""Makes the optimizer that OPTIMIZER describes over some groups of parameters."""

_NOTHING = nullcontext()


class Strategy:
    """How the processes of a run share an update; this one has a single process, which makes it
    alone.

    Args:
        world: the processes.

    Attributes:
        spreads: gradients are averaged over processes, so each process weighs its own with their
            number.
        warms_up: the first passes differ from later ones; two go before everything else.
        shards: no process holds all gradients, or not all state of the optimizer.
        reports: the loss of an update is known to be that of all processes.
        divides: each process has a piece of each weight, and saves it.
    """

    divides = False
    spreads = False
    reports = False
    warms_up = False
    shards = False

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, model: nn.Module, loss: nn.Module) -> None:
        """Change the modules in place, before the optimizer sees their parameters."""

    def optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return the optimizer over the trained parameters."""
        return make(groups)

    def in_optimizer(self, parameter: Tensor) -> Tensor:
        """Return what the optimizer has in the place of a trained parameter."""
        return parameter

    def wrap(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return what is called in place of a module in training; its state stays that of the
        module."""
        return module

    def step(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context of a micro-batch; only in the last one of an update do gradients go
        round.

        Args:
            last: it is the last one of an update.
            counts: it has samples that do.
        """
        return _NOTHING

    def place(self, micro: int) -> tuple[int, int]:
        """Return what the randomness of a micro-batch is seeded by: the process, and its number
        there."""
        return self.world.rank, micro

    def begin_test(self, *modules: nn.Module) -> None:
        """Get ready to call modules unwrapped in a test."""

    def mean(self, losses: Sequence[Tensor]) -> "Mean":
        """Begin to take the loss of an update from the shares of its micro-batches, over all
        processes."""
        return Mean(total(losses))

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the Euclidean norm of the whole gradient, 0-d."""
        return get_total_norm(gradients)

    def any(self, flag: Tensor) -> Tensor:
        """Return 1 where the flag of any process is, for what only one of them may know; may change
        it in place."""
        return flag

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a module as a checkpoint holds it; every process takes part."""
        return module.state_dict()

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Take over what `model_state` returned, perhaps under another strategy."""
        module.load_state_dict(state)

    def kept(self, optimizer: Optimizer) -> Mapping[Tensor, Any]:
        """Return what an optimizer keeps of the parameters that this process updates."""
        return optimizer.state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by number of parameter; every process takes part."""
        state: dict[str, Any] = optimizer.state_dict()["state"]
        return state

    def collect(self) -> None:
        """Bring the gradients of an update to where the optimizer looks for them."""

    def places(self, module: nn.Module, state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return for tensors of a saved state where this process takes its pieces of them; none: it
        takes all whole."""
        return []

    def optimizer_places(self, state: Mapping[Any, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return the same for the state of the optimizer."""
        return []

    def own_optimizer_state(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return what this process has of a saved state of the optimizer; all of it where weights
        are whole."""
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        """Take over what `optimizer_state` returned, perhaps under another strategy."""
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": dict(state), "param_groups": groups})


class Mean:
    """A mean over processes that may still be on its way.

    Args:
        value: of this process.
        world: the processes; with one, or without, the value is the mean.
    """

    def __init__(self, value: Tensor, world: World | None = None) -> None:
        self._size = 1 if world is None else world.size
        self._work = None
        self._value = value
        if world is not None and world.size > 1:
            self._value = value.clone()
            # On a CPU over the group for decisions: in the other one it would stand before the
            # gradients.
            group = None if value.device.type != "cpu" else world.control
            self._work = dist.all_reduce(self._value, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the mean."""
        if self._work is not None:
            self._work.wait()
            self._value, self._work = self._value / self._size, None
        return self._value


class Spreading(Strategy):
    """What strategies with several processes have in common: gradients averaged over all of
    them."""

    spreads = True
    reports = True

    def begin_test(self, *modules: nn.Module) -> None:
        """Give every process the main one's buffers."""
        for module in modules:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def mean(self, losses: Sequence[Tensor]) -> Mean:
        """Begin to take the loss of an update, the mean over processes of what each has summed
        up."""
        return Mean(total(losses), self.world)


STRATEGIES: Registry[Strategy] = Registry("strategy", "DISTRIBUTED.strategy")


@STRATEGIES.register("none")
def single(world: World) -> Strategy:
    """Return the strategy of a single process."""
    return Strategy(world)


def total(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses in their order."""
    found = losses[0]
    for loss in losses[1:]:
        found = found + loss
    return found


def trains(module: nn.Module) -> bool:
    """Tell whether a module has a parameter to train."""
    return any(parameter.requires_grad for parameter in module.parameters())


def device_of(module: nn.Module) -> torch.device:
    """Return where the parameters of a module are; the CPU for one without."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
