"""Base class of strategies, and the strategy of a single process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from phasetrain.config.registry import Registry
from phasetrain.distributed.strategies.state import StateAdapter
from phasetrain.distributed.world import World

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them: `params` and options."""

MakeOptimizer = Callable[[Groups], Optimizer]
"""Creates the optimizer described by OPTIMIZER over parameter groups."""

NO_CONTEXT = nullcontext()


class Strategy:
    """How the ranks of a run share an update; this class is for a single process.

    Args:
        world: the ranks.

    Attributes:
        state: reads and loads the state of modules and the optimizer.
        averages_gradients: gradients are averaged over ranks, so each rank has to multiply its
            loss by the world size where a sum is wanted.
        has_global_loss: `mean_loss` is the mean over all ranks.
        needs_warmup: the first two passes reduce gradients in another order than later ones, so
            they run before training starts.
        shards_optimizer: no rank holds all gradients, or all of the optimizer's state.
        shards_weights: each rank holds and saves a shard of each weight.
    """

    averages_gradients = False
    has_global_loss = False
    needs_warmup = False
    shards_optimizer = False
    shards_weights = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = StateAdapter()

    def prepare(self, model: nn.Module, loss: nn.Module) -> None:
        """Change the modules in place, before the optimizer sees their parameters."""

    def make_optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return the optimizer over the trained parameters."""
        return make(groups)

    def optimizer_parameter(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a trained parameter."""
        return parameter

    def wrap_module(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Return the module to call in training; state is read from the original module."""
        return module

    def reduce_after_passes(self) -> None:
        """Share gradients at the end of each gradient pass, for a task with several in a step;
        called before `wrap_module`."""

    def gradient_pass(self, parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Return the context of a gradient pass of a task with several in a step.

        Args:
            parameters: those that get the gradient; they may have one of an earlier pass.
        """
        return NO_CONTEXT

    def micro_batch(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context in which a micro-batch is computed.

        Args:
            last: this is the last one of the update; only then are gradients reduced.
            counts: it contains samples, not only padding.
        """
        return NO_CONTEXT

    def seed_key(self, micro: int) -> tuple[int, int]:
        """Return the two numbers that seed the randomness of a micro-batch."""
        return self.world.rank, micro

    def prepare_test(self, *modules: nn.Module) -> None:
        """Make buffers equal on all ranks before unwrapped modules are tested."""

    def mean_loss(self, losses: Sequence[Tensor]) -> "AsyncMean":
        """Start to compute the loss of an update over all ranks.

        Args:
            losses: this rank's terms, one per micro-batch.
        """
        return AsyncMean(sum_losses(losses))

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the Euclidean norm of the whole gradient, 0-d."""
        return get_total_norm(gradients)

    def any_rank(self, flag: Tensor) -> Tensor:
        """Return 1 if the flag of any rank is 1; may change the flag in place."""
        return flag

    def collect_gradients(self) -> None:
        """Move the gradients of an update to the tensors that the optimizer updates."""


class AsyncMean:
    """A mean over ranks that may still be in flight.

    Args:
        value: this rank's value.
        world: the ranks; None: the value is the mean.
    """

    def __init__(self, value: Tensor, world: World | None = None) -> None:
        self._size = 1 if world is None else world.size
        self._work = None
        self._value = value
        if world is not None and world.size > 1:
            self._value = value.clone()
            # On the CPU over the control group: in the default group of gloo it would be queued
            # in front of the gradients.
            group = None
            if value.device.type == "cpu":
                group = world.control
            self._work = dist.all_reduce(self._value, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the mean."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._value = self._value / self._size
        return self._value


class GradientAveraging(Strategy):
    """Base of strategies that average gradients over ranks."""

    averages_gradients = True
    has_global_loss = True

    def prepare_test(self, *modules: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks."""
        broadcast_tensors(buffer for module in modules for buffer in module.buffers())

    def mean_loss(self, losses: Sequence[Tensor]) -> AsyncMean:
        """Start to compute the mean over ranks of each rank's sum of losses."""
        return AsyncMean(sum_losses(losses), self.world)


STRATEGIES: Registry[Strategy] = Registry("strategy", "DISTRIBUTED.strategy")


@STRATEGIES.register("none")
def single_process(world: World) -> Strategy:
    """Return the strategy of a single process."""
    return Strategy(world)


def broadcast_state(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    broadcast_tensors((*module.parameters(), *module.buffers()))


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Give tensors of all ranks the content that they have on rank 0."""
    for tensor in tensors:
        # Through a contiguous copy: broadcast does not take channels_last tensors.
        contiguous = tensor.detach().contiguous()
        dist.broadcast(contiguous, src=0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(contiguous)


@contextmanager
def set_aside_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters no gradient, and afterwards add the gradients that they had before."""
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, before in zip(parameters, earlier, strict=True):
        if before is None:
            continue
        if parameter.grad is not None:
            before.add_(parameter.grad)
        parameter.grad = before


def sum_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses, added from first to last."""
    # Not torch.stack(...).sum(): its order of additions, and so the last bits, may differ.
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def is_trainable(module: nn.Module) -> bool:
    """Tell whether a module has a parameter to train."""
    return any(parameter.requires_grad for parameter in module.parameters())


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters; the CPU if it has none."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
