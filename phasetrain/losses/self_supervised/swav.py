"""Prediction of one view's cluster assignment from another view (SwAV)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from phasetrain.distributed import World, reduce
from phasetrain.losses.base import LOSSES
from phasetrain.losses.self_supervised.multi_view import (
    check_positive,
    check_views,
    enqueue,
    of_all,
)

TINY = 1e-30
"""Keeps a division of nothing by nothing finite; far below any score that counts."""


@LOSSES.register("swav")
class SwAV(nn.Module):
    """Swapped prediction of codes (Caron et al. 2020, arXiv:2006.09882, equations 1 to 5).

    Scores of a view are the cosines of its embeddings with the prototypes. The codes q of the first
    views are made of their scores by Sinkhorn's algorithm, so that all prototypes are used equally
    over the samples of all processes, those of a queue included. The loss is the mean over samples,
    views a with codes, and other views b, of

        -sum_k q_ak log softmax_k(scores_b / temperature).

    Args:
        dimensions: fact; D, the size of an embedding.
        batch_size: fact; samples of an update over all processes.
        prototypes: K.
        temperature: of the predictions.
        epsilon: smoothness of codes.
        iterations: of Sinkhorn's algorithm.
        code_views: how many views, the first ones, get codes.
        queue: embeddings of samples before, for each of these views, that take part in making
            codes; 0 keeps none.
        queue_updates: updates before which the queue is filled but takes no part.
        frozen_updates: updates before which the prototypes are not trained.
        world: fact; the processes.

    Attributes:
        prototypes: `(K, D)`; their length does not matter.
        queue: `(code_views, queue, D)`, the same on all processes.
        place, filled: number of the oldest row of the queue, and how many have been filled, 0-d.

    Raises:
        ValueError: a size that is not above 0, or a queue that is shorter than a batch.
    """

    coupled = True
    taught = False
    queue: Tensor
    place: Tensor
    filled: Tensor

    def __init__(
        self,
        dimensions: int,
        batch_size: int = 1,
        prototypes: int = 3000,
        temperature: float = 0.1,
        epsilon: float = 0.05,
        iterations: int = 3,
        code_views: int = 2,
        queue: int = 0,
        queue_updates: int = 0,
        frozen_updates: int = 0,
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_positive(
            dimensions=dimensions, prototypes=prototypes, temperature=temperature, epsilon=epsilon
        )
        check_positive(iterations=iterations, code_views=code_views)
        if queue and queue < batch_size:
            raise ValueError(
                f"queue = {queue}: a batch has {batch_size} samples; give 0, or at least as many"
            )
        self.temperature = temperature
        self.epsilon = epsilon
        self.iterations = iterations
        self.code_views = code_views
        self.queue_updates = queue_updates
        self.frozen_updates = frozen_updates
        self._world = world or World()
        self._updates = 0
        self.prototypes = nn.Parameter(normalize(torch.randn(prototypes, dimensions), dim=1))
        self.register_buffer("queue", torch.zeros(code_views, queue, dimensions))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def advance(self, where: float, updates: int) -> None:
        """Take over the position."""
        self._updates = updates

    def held(self) -> Sequence[nn.Parameter]:
        """Return the prototypes as long as they are frozen."""
        if self._updates < self.frozen_updates:
            return [self.prototypes]
        return []

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this process, a scalar, of views `(N, D)`."""
        check_views(views)
        coded = range(min(self.code_views, len(views)))
        prototypes = normalize(self.prototypes, dim=1).T
        embeddings = [normalize(view, dim=1) for view in views]
        scores = [embedding @ prototypes for embedding in embeddings]
        codes = [self._codes(scores[view].detach(), prototypes.detach(), view) for view in coded]
        logs = [log_softmax(score / self.temperature, dim=1) for score in scores]
        losses = [-(codes[a] * logs[b]).sum() for a in coded for b in range(len(views)) if a != b]
        if self.training and self.queue.shape[1]:
            self._keep([embeddings[view].detach() for view in coded])
        return torch.stack(losses).mean() / max(len(views[0]), 1)

    @torch.no_grad()
    def _codes(self, scores: Tensor, prototypes: Tensor, view: int) -> Tensor:
        """Return the codes `(N, K)` of one view's scores `(N, K)`."""
        count = len(scores)
        length = self.queue.shape[1]
        counted = torch.ones_like(scores[:, :1])
        if self.training and length and self._updates >= self.queue_updates:
            begin, end = self._world.shard(0, length)  # each process sees to its share of the queue
            scores = torch.cat([scores, self.queue[view, begin:end].to(scores) @ prototypes])
            there = torch.arange(begin, end, device=scores.device)[:, None] < self.filled
            counted = torch.cat([counted, there.to(counted)])
        return sinkhorn(
            self._world, scores, counted, epsilon=self.epsilon, iterations=self.iterations
        )[:count]

    def _keep(self, embeddings: Sequence[Tensor]) -> None:
        everyone, _ = of_all(
            self._world, torch.stack(list(embeddings), dim=1), equal=True
        )  # (G, code_views, D)
        begin = self.place.clone()
        for view in range(everyone.shape[1]):
            self.place.copy_(begin)
            enqueue(self.queue[view], self.place, everyone[:, view])
        self.filled.add_(len(everyone)).clamp_(max=self.queue.shape[1])


def sinkhorn(
    world: World, scores: Tensor, counted: Tensor, *, epsilon: float, iterations: int
) -> Tensor:
    """Return codes: rows that sum to 1, with columns of nearly equal sums over all processes
    (Cuturi 2013).

    Args:
        world: the processes, each with rows of its own; every process takes part.
        scores: `(N, K)`, at most 1.
        counted: 1 for rows that take part, 0 for others, `(N, 1)`.
        epsilon: the smaller, the closer codes are to one prototype each.
        iterations: of bringing columns, then rows, to equal sums.
    """
    codes = torch.exp((scores - 1) / epsilon) * counted
    for _ in range(iterations):
        codes = codes / reduce(world, codes.sum(dim=0)).clamp_min(TINY)
        codes = codes / codes.sum(dim=1, keepdim=True).clamp_min(TINY)
    return codes
