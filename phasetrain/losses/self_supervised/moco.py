"""Contrast of a view with a queue of keys that a momentum encoder has made (MoCo)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from phasetrain.distributed import World
from phasetrain.losses.base import LOSSES
from phasetrain.losses.self_supervised.multi_view import (
    check_positive,
    enqueue,
    of_all,
    pairs_with_teacher,
)


@LOSSES.register("moco")
class MoCo(nn.Module):
    """Contrast with a queue of keys (He et al. 2020, arXiv:1911.05722, equation 1).

    For a query q, the normalised embedding of a view, its key k, the teacher's of another view of
    the same sample, and the keys n_j of samples before, the term is

        -log exp(q k / t) / (exp(q k / t) + sum_j exp(q n_j / t)),

    and the loss is the mean over samples and over all pairs of different views. After each training
    batch the keys of all processes take the place of the oldest ones.

    Args:
        dimensions: fact; D, the size of an embedding.
        batch_size: fact; samples of an update over all processes.
        queue: keys in the queue, at least those of one batch.
        temperature: t.
        world: fact; the processes.

    Attributes:
        queue: `(queue, D)`, random directions at first; the same on all processes.
        place: number of the oldest key, 0-d.

    Raises:
        ValueError: a queue that is shorter than a batch, a size or temperature that is not above 0.
    """

    coupled = True
    taught = True
    queue: Tensor
    place: Tensor

    def __init__(
        self,
        dimensions: int,
        batch_size: int = 1,
        queue: int = 65536,
        temperature: float = 0.2,
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_positive(dimensions=dimensions, temperature=temperature)
        if queue < batch_size:
            raise ValueError(
                f"queue = {queue}: a batch has {batch_size} samples, and the queue takes at least as many"
            )
        self.temperature = temperature
        self._world = world or World()
        self.register_buffer("queue", normalize(torch.randn(queue, dimensions), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this process, a scalar, of views and targets
        `(N, D)`."""
        pairs = pairs_with_teacher(views, targets)
        queries = [normalize(view, dim=1) for view in views]
        keys = [normalize(target.detach(), dim=1) for target in targets or ()]
        before = self.queue.to(queries[0], copy=True)  # the backward pass needs it as it is now
        losses = [self._contrast(queries[view], keys[taught], before) for view, taught in pairs]
        if self.training:
            for key in keys:
                enqueue(self.queue, self.place, of_all(self._world, key, equal=True)[0])
        return torch.stack(losses).mean()

    def _contrast(self, queries: Tensor, keys: Tensor, before: Tensor) -> Tensor:
        alike = (queries * keys).sum(dim=1, keepdim=True)
        logits = torch.cat([alike, queries @ before.T], dim=1) / self.temperature
        first = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
        return cross_entropy(logits, first, reduction="sum") / max(len(queries), 1)
