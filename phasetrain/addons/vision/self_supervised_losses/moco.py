"""MoCo: contrast a view with a queue of keys made by a momentum encoder."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    enqueue_rows,
    gather_embeddings,
    pair_views_with_teacher,
)
from phasetrain.config.checks import check_positive
from phasetrain.distributed import World
from phasetrain.losses.base import LOSSES


@LOSSES.register("moco")
class MoCo(nn.Module):
    """Contrast with a queue of keys (He et al. 2020, arXiv:1911.05722, equation 1).

    For a query q (the normalised embedding of a view), its key k (the teacher's embedding of
    another view of the same sample) and the keys n_j of earlier samples, the term is

            -log exp(q k / t) / (exp(q k / t) + sum_j exp(q n_j / t)),

    and the loss is the mean over samples and over all pairs of different views. After each training
    batch the keys of all ranks replace the oldest ones, for two views two per sample. Without
    `symmetric`, as in the paper and in VISSL, the first view is the query and the second one the
    key, and only this key is enqueued: the queue reaches back over twice as many batches.

    Args:
        dimensions: fact; D, the size of an embedding.
        batch_size: fact; samples per update over all ranks.
        queue: number of keys in the queue, at least one batch.
        temperature: t.
        symmetric: use each view as query and as key.
        world: fact; the ranks of the run.

    Attributes:
        queue: `(queue, D)`, initially random directions; the same on all ranks.
        place: index of the oldest key, 0-d.

    Raises:
        ValueError: the queue is shorter than a batch, or a size or temperature is not positive.
    """

    coupled = True
    uses_teacher = True
    queue: Tensor
    place: Tensor

    def __init__(
        self,
        dimensions: int,
        batch_size: int = 1,
        queue: int = 65536,
        temperature: float = 0.2,
        *,
        symmetric: bool = True,
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_positive(dimensions=dimensions, temperature=temperature)
        if queue < batch_size:
            raise ValueError(
                f"queue = {queue}: expected at least {batch_size}, the samples of a batch"
            )
        self.temperature = temperature
        self.symmetric = symmetric
        self._world = world or World()
        self.register_buffer("queue", normalize(torch.randn(queue, dimensions), dim=1))
        # A tensor, so that it is saved with the queue, and advanced without a wait for the device.
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this rank, a scalar, of views and targets `(N,
        D)`."""
        pairs = pair_views_with_teacher(views, targets)
        if not self.symmetric:
            pairs = [pair for pair in pairs if pair == (0, 1)]
            if not pairs:
                raise ValueError(
                    "LOSS.symmetric = false: the teacher has to embed the second view; set "
                    "TASK.teacher_views to at least 2"
                )
        queries = [normalize(view, dim=1) for view in views]
        keys = [normalize(target.detach(), dim=1) for target in targets or ()]
        # A copy, because the backward pass needs the queue as it was before this batch is enqueued.
        negatives = self.queue.to(queries[0], copy=True)
        losses = [
            self._compute_contrast(queries[view], keys[other], negatives) for view, other in pairs
        ]
        if self.training:
            enqueued = keys if self.symmetric else keys[1:2]
            for key in enqueued:
                enqueue_rows(
                    self.queue, self.place, gather_embeddings(self._world, key, equal=True)[0]
                )
        return torch.stack(losses).mean()

    def _compute_contrast(self, queries: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
        positives = (queries * keys).sum(dim=1, keepdim=True)
        logits = torch.cat([positives, queries @ negatives.T], dim=1) / self.temperature
        # The positive is column 0 of every row.
        target = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
        return cross_entropy(logits, target, reduction="sum") / max(len(queries), 1)
