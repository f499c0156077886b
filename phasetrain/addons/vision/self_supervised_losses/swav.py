"""SwAV: predict the cluster assignment of one view from another view."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    check_views,
    enqueue_rows,
    gather_embeddings,
)
from phasetrain.config.checks import check_at_least, check_positive
from phasetrain.distributed import World, reduce
from phasetrain.losses.base import LOSSES

TINY = 1e-30
"""Avoids 0 / 0; far below any score that matters."""


@dataclass(frozen=True)
class CodeSettings:
    """How codes are made.

    Attributes:
        views: number of views, the first ones, that get codes.
        epsilon: smoothness of codes.
        iterations: iterations of Sinkhorn's algorithm.
        power_law: prototype k = 1, 2, ... gets a share of the samples proportional to
            k ** -power_law; 0: equal shares.
    """

    views: int = 2
    epsilon: float = 0.05
    iterations: int = 3
    power_law: float = 0.0


@dataclass(frozen=True)
class QueueSettings:
    """Embeddings of earlier samples that take part in making codes.

    Attributes:
        length: embeddings per view with codes; 0 disables the queue.
        start_update: number of updates during which the queue is filled but not used.
    """

    length: int = 0
    start_update: int = 0


class SwAV(nn.Module):
    """Swapped prediction of codes (Caron et al. 2020, arXiv:2006.09882, equations 1 to 5).

    The scores of a view are the cosines of its embeddings with the prototypes. The codes q of the
    first views are made from their scores by Sinkhorn's algorithm, so that all prototypes are used
    equally over the samples of all ranks, including the samples of a queue. The loss is the mean
    over samples, views a with codes, and other views b, of

        -sum_k q_ak log softmax_k(scores_b / temperature).

    Args:
        dimensions: D, the size of an embedding.
        prototypes: K.
        temperature: temperature of the predictions.
        codes: how codes are made.
        queue: length and start of the queue.
        frozen_updates: number of updates at the start during which the prototypes are frozen.
        projected: before each update the prototypes are projected to unit vectors, as in the
            authors' code; otherwise they are normalized in the loss.
        world: the ranks of the run.

    Attributes:
        prototypes: `(K, D)`; their norms do not matter.
        queue: `(views, length, D)`, the same on all ranks.
        place: index of the oldest row of the queue, 0-d.
        filled: number of rows that have been filled, 0-d.

    Raises:
        ValueError: a size is not positive.
    """

    coupled = True
    uses_teacher = False
    queue: Tensor
    place: Tensor
    filled: Tensor

    def __init__(
        self,
        dimensions: int,
        prototypes: int = 3000,
        temperature: float = 0.1,
        codes: CodeSettings = CodeSettings(),
        queue: QueueSettings = QueueSettings(),
        frozen_updates: int = 0,
        world: World | None = None,
        *,
        projected: bool = False,
    ) -> None:
        super().__init__()
        check_positive(
            dimensions=dimensions,
            prototypes=prototypes,
            temperature=temperature,
            epsilon=codes.epsilon,
            iterations=codes.iterations,
            code_views=codes.views,
        )
        check_at_least(0, power_law=codes.power_law)
        self.temperature = temperature
        self.codes = codes
        self.queue_start = queue.start_update
        self.frozen_updates = frozen_updates
        self.projected = projected
        self._world = world or World()
        self._updates = 0
        self.prototypes = nn.Parameter(normalize(torch.randn(prototypes, dimensions), dim=1))
        self.register_buffer("queue", torch.zeros(codes.views, queue.length, dimensions))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def advance(self, where: float, updates: int) -> None:
        """Set the number of updates before this step, and project the prototypes."""
        self._updates = updates
        if self.projected and self.training:
            # Before a step and not after the update, which the loss does not see; in between, no
            # training step uses them.
            with torch.no_grad():
                self.prototypes.copy_(normalize(self.prototypes, dim=1))

    def frozen_parameters(self) -> Sequence[nn.Parameter]:
        """Return the prototypes while they are frozen."""
        if self._updates < self.frozen_updates:
            return [self.prototypes]
        return []

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this rank, a scalar, of views `(N, D)`."""
        check_views(views)
        coded = range(min(self.codes.views, len(views)))
        if self.projected and self.training:
            prototypes = self.prototypes.T
        else:
            prototypes = normalize(self.prototypes, dim=1).T
        embeddings = [normalize(view, dim=1) for view in views]
        scores = [embedding @ prototypes for embedding in embeddings]
        codes = [
            self._make_codes(scores[view].detach(), prototypes.detach(), view) for view in coded
        ]
        logs = [log_softmax(score / self.temperature, dim=1) for score in scores]
        losses = [-(codes[a] * logs[b]).sum() for a in coded for b in range(len(views)) if a != b]
        # After the codes: a batch is never among the earlier samples of its own codes.
        if self.training and self.queue.shape[1]:
            self._enqueue([embeddings[view].detach() for view in coded])
        return torch.stack(losses).mean() / max(len(views[0]), 1)

    @torch.no_grad()
    def _make_codes(self, scores: Tensor, prototypes: Tensor, view: int) -> Tensor:
        """Return the codes `(N, K)` of the scores `(N, K)` of one view."""
        count = len(scores)
        length = self.queue.shape[1]
        counted = torch.ones_like(scores[:, :1])
        if self.training and length and self._updates >= self.queue_start:
            # Every rank holds the whole queue, and scores only its shard of it.
            begin, end = self._world.shard(0, length)
            scores = torch.cat([scores, self.queue[view, begin:end].to(scores) @ prototypes])
            # A mask instead of a slice: slicing by `filled` would wait for the device.
            is_filled = torch.arange(begin, end, device=scores.device)[:, None] < self.filled
            counted = torch.cat([counted, is_filled.to(counted)])
        codes = balance_codes(
            self._world,
            scores,
            counted,
            epsilon=self.codes.epsilon,
            iterations=self.codes.iterations,
            power_law=self.codes.power_law,
        )
        return codes[:count]

    def _enqueue(self, embeddings: Sequence[Tensor]) -> None:
        stacked = torch.stack(list(embeddings), dim=1)
        # Rows in rank order on every rank, so the queues of all ranks stay bit-identical.
        everyone, _ = gather_embeddings(self._world, stacked, equal=True)  # (G, views, D)
        # All views share one `place`; each of their queues starts from the same row.
        begin = self.place.clone()
        for view in range(everyone.shape[1]):
            self.place.copy_(begin)
            enqueue_rows(self.queue[view], self.place, everyone[:, view])
        self.filled.add_(len(everyone)).clamp_(max=self.queue.shape[1])


@LOSSES.register("swav")
def build_swav(  # one parameter per key of section LOSS
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
    power_law: float = 0.0,
    world: World | None = None,
    *,
    projected: bool = False,
) -> SwAV:
    """Build the SwAV loss: swapped prediction of codes (Caron et al. 2020, arXiv:2006.09882).

    Args:
        dimensions: fact; size of an embedding.
        batch_size: fact; samples per update over all ranks.
        prototypes: number of prototypes.
        temperature: temperature of the predictions.
        epsilon: smoothness of codes.
        iterations: iterations of Sinkhorn's algorithm.
        code_views: number of views, the first ones, that get codes.
        queue: embeddings of earlier samples, per view with codes, that take part in making codes; 0
            disables the queue.
        queue_updates: number of updates during which the queue is filled but not used.
        frozen_updates: number of updates at the start during which the prototypes are frozen.
        power_law: exponent of the sizes of clusters, for data with rare classes: prototype k = 1,
            2, ... gets a share of the samples proportional to k ** -power_law; 0: equal shares.
        world: fact; the ranks of the run.
        projected: before each update the prototypes are projected to unit vectors, as in the
            authors' code; otherwise they are normalized in the loss.

    Raises:
        ValueError: a size is not positive, power_law is negative, or the queue is shorter than a
            batch.
    """
    if queue and queue < batch_size:
        raise ValueError(
            f"queue = {queue}: expected 0 or at least {batch_size}, the samples of a batch"
        )
    return SwAV(
        dimensions,
        prototypes,
        temperature,
        CodeSettings(code_views, epsilon, iterations, power_law),
        QueueSettings(queue, queue_updates),
        frozen_updates,
        world,
        projected=projected,
    )


def balance_codes(
    world: World,
    scores: Tensor,
    counted: Tensor,
    *,
    epsilon: float,
    iterations: int,
    power_law: float = 0.0,
) -> Tensor:
    """Return codes by Sinkhorn's algorithm (Cuturi 2013): rows that sum to 1, and columns with sums
    over all ranks that are nearly equal, or follow a power law.

    Args:
        world: the ranks of the run, each with its own rows; a collective call.
        scores: `(N, K)`, at most 1.
        counted: 1 for rows that take part, 0 for others, `(N, 1)`.
        epsilon: the smaller, the closer each code is to a single prototype.
        iterations: how often columns, then rows, are normalised.
        power_law: the sum of column k = 1, 2, ... is proportional to k ** -power_law.
    """
    shares = torch.arange(1, scores.shape[1] + 1, device=scores.device).to(scores) ** -power_law
    # Scores are cosines, so subtracting 1 keeps exp within [0, 1] in float32.
    codes = torch.exp((scores - 1) / epsilon) * counted
    for _ in range(iterations):
        # Columns over all ranks, so that the codes are those of one process with the whole batch.
        codes = codes / reduce(world, codes.sum(dim=0)).clamp_min(TINY)
        if power_law:
            codes = codes * shares
        codes = codes / codes.sum(dim=1, keepdim=True).clamp_min(TINY)
    return codes
