"""Gradients added in an order that does not depend on the number of processes
(`DISTRIBUTED.reduction: ordered`)."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phasetrain.distributed.buffers import buffer_lookup
from phasetrain.distributed.strategies.base import Mean, Strategy
from phasetrain.distributed.world import World


class Ordered(Strategy):
    """Cuts each batch into a fixed number of virtual shards and adds their gradients along a fixed
    balanced tree.

    Each process computes equally many shards, one after the other, and owns the part of the tree
    above them; processes then add what they have in pairs, with neighbours first. Since neither the
    shards nor the tree depend on the number of processes, nor do the bits of the weights.
    Randomness in the model is seeded by shard. Buffers (running statistics) begin each shard as
    they were before the update, and become the mean of what the shards have made of them.

    Costs a pass per shard, the memory of the gradients for each level of the tree that a process
    owns, and log2 of the number of processes exchanges of the whole gradient.

    Args:
        world: the processes; their number divides that of the shards.
        shards: virtual shards, a power of two.
    """

    reports = True

    def __init__(self, world: World, shards: int) -> None:
        super().__init__(world)
        self._own = shards // world.size
        self._modules: tuple[nn.Module, ...] = ()
        self._buffers = buffer_lookup()
        self._parameters: list[nn.Parameter] = []
        self._tree = Tree()
        self._before: list[Tensor] = []
        self._first: list[Tensor] = []

    def prepare(self, model: nn.Module, loss: nn.Module) -> None:
        """Note what gradients and running statistics belong to."""
        self._modules = (model, loss)
        self._buffers = buffer_lookup(model, loss)
        self._parameters = [
            p for module in self._modules for p in module.parameters() if p.requires_grad
        ]

    def place(self, micro: int) -> tuple[int, int]:
        """Return what the randomness of a micro-batch is seeded by: the number of its shard."""
        return 0, self.world.rank * self._own + micro

    @contextmanager
    def _shard(self, *, last: bool, counts: bool) -> Iterator[None]:
        if not self._tree:
            self._before = [buffer.clone() for buffer in self._buffers()]
        else:
            _copy(self._buffers(), self._before)
        yield
        buffers = self._buffers()  # looked up again: a module may have put others in their place
        if not self._tree:
            self._first = [buffer.clone() for buffer in buffers]
        self._tree.add(self._leaf(buffers, counts=counts))
        for parameter in self._parameters:
            parameter.grad = None
        if last:
            self._finish(buffers)

    def step(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context of a shard, after the last of which the gradient is that of the whole
        batch."""
        return self._shard(last=last, counts=counts)

    def mean(self, losses: Sequence[Tensor]) -> Mean:
        """Return the sum of the shares of all shards, along the same tree."""
        tree = Tree()
        for loss in losses:
            tree.add([loss.detach().reshape(1).clone()])
        return Mean(self._over_processes(tree.take())[0].reshape(()))

    def _leaf(self, buffers: list[Tensor], *, counts: bool) -> list[Tensor]:
        """Return what is added of one shard: gradients, which of them are there, statistics, and
        how many shards."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        there = torch.tensor(
            [float(p.grad is not None) for p in self._parameters] + [float(counts)]
        )
        numbers = [b if counts else torch.zeros_like(b) for b in buffers if b.is_floating_point()]
        return [_flat(gradients), there.to(gradients[0].device), *(n.clone() for n in numbers)]

    def _finish(self, buffers: list[Tensor]) -> None:
        gradient, there, *numbers = self._over_processes(self._tree.take())
        *found, shards = there.tolist()
        at = 0
        for parameter, any_shard in zip(self._parameters, found, strict=True):
            if any_shard:
                part = gradient[at : at + parameter.numel()].view(parameter.shape)
                parameter.grad = torch.empty_like(parameter).copy_(part)
            at += parameter.numel()
        means = iter(numbers)
        for buffer, first in zip(buffers, self._first, strict=True):
            if buffer.is_floating_point():
                buffer.copy_(next(means) / shards)
            else:
                if self.world.size > 1:
                    dist.broadcast(first, src=0)
                buffer.copy_(first)

    def _over_processes(self, sums: list[Tensor]) -> list[Tensor]:
        """Add what each process has, neighbours first; every process gets the same bits, as a + b
        is b + a."""
        distance = 1
        while distance < self.world.size:
            partner = self.world.rank ^ distance
            for tensor in sums:
                other = torch.empty_like(tensor)
                both = [
                    dist.P2POp(dist.isend, tensor, partner),
                    dist.P2POp(dist.irecv, other, partner),
                ]
                for work in dist.batch_isend_irecv(both):
                    work.wait()
                tensor.add_(other)
            distance *= 2
        return sums


class Tree:
    """Adds lists of tensors along a balanced binary tree, with at most one unfinished sum per
    level."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, leaf: list[Tensor]) -> None:
        """Add the next leaf, which may be changed in place."""
        level = 0
        while self._sums and self._sums[-1][0] == level:
            _, left = self._sums.pop()
            torch._foreach_add_(left, leaf)
            level, leaf = level + 1, left
        self._sums.append((level, leaf))

    def take(self) -> list[Tensor]:
        """Return the sum of all leaves, a power of two of them, and begin anew."""
        (_, found), *rest = self._sums
        assert not rest, "the number of leaves is no power of two"
        self._sums = []
        return found


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
