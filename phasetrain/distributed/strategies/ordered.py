"""Gradients added in an order that does not depend on the world size
(`DISTRIBUTED.reduction: ordered`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phasetrain.distributed.buffers import buffer_lookup
from phasetrain.distributed.strategies.base import AsyncMean, Strategy, set_aside_gradients
from phasetrain.distributed.world import World
from phasetrain.errors import ConfigError


class Ordered(Strategy):
    """Splits each batch into a fixed number of virtual shards and adds their gradients along a
    fixed balanced tree.

    Each rank computes the same number of consecutive shards and the part of the tree above them;
    ranks then add their sums in pairs, neighbours first. Neither the shards nor the tree depend on
    the world size, so neither do the bits of the weights. Randomness in the model is seeded by
    shard. Each shard starts from the buffers (running statistics) before the update, and their
    mean over shards is kept.

    Costs a pass per shard, the memory of the gradients for each level of a rank's tree, and
    log2(world size) exchanges of the whole gradient.

    Args:
        world: the ranks; the world size divides the number of shards.
        shards: number of virtual shards, a power of two.
    """

    has_global_loss = True

    def __init__(self, world: World, shards: int) -> None:
        super().__init__(world)
        self._shards_per_rank = shards // world.size
        self._buffers = buffer_lookup()
        self._parameters: Sequence[Tensor] = []
        self._shards_seen = 0
        self._tree = ReductionTree()
        self._buffers_before: list[Tensor] = []
        self._first_shard_buffers: list[Tensor] = []

    def prepare(self, model: nn.Module, loss: nn.Module) -> None:
        """Note the trained parameters and the buffers."""
        self._buffers = buffer_lookup(model, loss)
        self._parameters = [
            parameter
            for module in (model, loss)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def seed_key(self, micro: int) -> tuple[int, int]:
        """Return 0 and the number of the shard, which do not depend on the world size."""
        return 0, self.world.rank * self._shards_per_rank + micro

    @contextmanager
    def gradient_pass(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Return the context of a gradient pass, whose gradients are added to earlier ones."""
        trained = self._parameters
        self._parameters = parameters
        try:
            with set_aside_gradients(parameters):
                yield
        finally:
            self._parameters = trained

    @contextmanager
    def micro_batch(self, *, last: bool, counts: bool = True) -> Iterator[None]:
        """Return the context of a shard; after the last one, gradients cover the whole batch."""
        is_first = not self._tree
        # Every shard starts from the same running statistics, so their order does not matter.
        if is_first:
            self._buffers_before = [buffer.clone() for buffer in self._buffers()]
        else:
            _copy_all(self._buffers(), self._buffers_before)
        yield
        buffers = self._buffers()  # looked up again: the module may have assigned new tensors
        if is_first:
            self._first_shard_buffers = [buffer.clone() for buffer in buffers]
        self._tree.add(self._shard_result(buffers, counts=counts))
        for parameter in self._parameters:
            parameter.grad = None
        self._shards_seen += 1
        if last:
            self._require_all_shards()
            self._finish_update(buffers)

    def mean_loss(self, losses: Sequence[Tensor]) -> AsyncMean:
        """Return the loss of an update, added along the same tree as the gradients."""
        tree = ReductionTree()
        for loss in losses:
            # A copy, because the tree adds in place.
            tree.add([loss.detach().reshape(1).clone()])
        return AsyncMean(self._add_over_ranks(tree.take())[0].reshape(()))

    def _shard_result(self, buffers: list[Tensor], *, counts: bool) -> list[Tensor]:
        """Return a leaf of the tree.

        The tensors are the flat gradient; for each parameter whether it has a gradient, and
        whether the shard counts; then each floating-point buffer.
        """
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        present = [float(parameter.grad is not None) for parameter in self._parameters]
        flags = torch.tensor([*present, float(counts)])
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        # Clones: the tree adds into its leaves in place. A shard of padding adds nothing.
        statistics = [
            buffer.clone() if counts else torch.zeros_like(buffer)
            for buffer in buffers
            if _has_mean(buffer)
        ]
        return [flat, flags.to(flat.device, non_blocking=True), *statistics]

    def _require_all_shards(self) -> None:
        seen = self._shards_seen
        self._shards_seen = 0
        if seen != self._shards_per_rank:
            raise ConfigError(
                f"DISTRIBUTED.reduction = 'ordered': a gradient pass of the task has {seen} of the "
                f"{self._shards_per_rank} micro-batches of a step, and only a pass over all of "
                "them adds gradients in an order that does not depend on the world size; pass all "
                "micro-batches, or use DISTRIBUTED.reduction=native",
                code="config.conflict",
            )

    def _finish_update(self, buffers: list[Tensor]) -> None:
        gradient, flags, *statistics = self._add_over_ranks(self._tree.take())
        *gradient_counts, shards = flags.tolist()
        at = 0
        for parameter, count in zip(self._parameters, gradient_counts, strict=True):
            if count:
                part = gradient[at : at + parameter.numel()].view(parameter.shape)
                if not parameter.is_complex():  # complex ones make the flat gradient complex
                    part = part.real
                # empty_like keeps the memory format of the parameter (channels_last).
                parameter.grad = torch.empty_like(parameter).copy_(part)
            at += parameter.numel()
        sums = iter(statistics)
        for buffer, first in zip(buffers, self._first_shard_buffers, strict=True):
            if _has_mean(buffer):
                buffer.copy_(next(sums) / shards)
            else:  # counters have no mean: the first shard of the batch decides
                if self.world.size > 1:
                    dist.broadcast(first, src=0)
                buffer.copy_(first)

    def _add_over_ranks(self, sums: list[Tensor]) -> list[Tensor]:
        """Add the sums of all ranks in place, in pairs, neighbours first."""
        # Not all_reduce, whose order of additions depends on the world size. Both partners of a
        # pair get the same bits, since a + b is b + a.
        distance = 1
        while distance < self.world.size:
            partner = self.world.rank ^ distance
            for tensor in sums:
                other = torch.empty_like(tensor)
                exchange = [
                    dist.P2POp(dist.isend, tensor, partner),
                    dist.P2POp(dist.irecv, other, partner),
                ]
                for work in dist.batch_isend_irecv(exchange):
                    work.wait()
                tensor.add_(other)
            distance *= 2
        return sums


class ReductionTree:
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
            leaf = left
            level += 1
        self._sums.append((level, leaf))

    def take(self) -> list[Tensor]:
        """Return the sum of all leaves, whose number is a power of two, and empty the tree."""
        (_, total), *unfinished = self._sums
        assert not unfinished, "the number of leaves is not a power of two"
        self._sums = []
        return total


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
