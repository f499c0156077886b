"""DeepCluster v2: predict the cluster of a sample, found by k-means in each epoch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from phasetrain.addons.vision.clustering import assign_rows, find_clusters
from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    check_views,
    gather_embeddings,
)
from phasetrain.config.checks import check_at_least, check_positive
from phasetrain.distributed import World, gather_rows
from phasetrain.losses.base import LOSSES


@LOSSES.register("deepcluster_v2")
class DeepClusterV2(nn.Module):
    """Prediction of clusters of the previous epoch (Caron et al. 2020, arXiv:2006.09882, appendix
    A.3).

    A memory holds the newest normalised embeddings of the first views of every training sample.
    Before each epoch, k-means by cosine divides it into clusters, several times with other starts.
    With the centroids c and the cluster k of a sample, the term of a view with the embedding z is

            -log softmax_k(c z / temperature),

    and the loss is the mean over clusterings, views and samples. The centroids are not trained.
    The task fills the memory before the first epoch with a pass over the data. A sample that this
    pass has not read has no cluster, and its term is 0. In a test, the cluster is the one nearest
    to the first view.

    Args:
        dimensions: fact; D, the size of an embedding.
        train_samples: fact; S, the number of training samples.
        clusters: number of clusters in each clustering.
        iterations: iterations of k-means.
        temperature: temperature of the predictions.
        memory_views: number of views, the first ones, that are remembered; clusterings take them in
            turns.
        world: fact; the ranks of the run.

    Attributes:
        memory: `(memory_views, S, D)`, the same on all ranks.
        is_filled: samples that are in the memory, bool `(S,)`.
        assignments: cluster of each sample in each clustering, `(clusterings, S)`; -1 if none.
        centroids: `(clusters of all clusterings, D)`.

    Raises:
        ValueError: a number is not positive, or there are fewer samples than clusters.
    """

    coupled = True
    uses_teacher = False
    memory: Tensor
    is_filled: Tensor
    assignments: Tensor
    centroids: Tensor

    def __init__(
        self,
        dimensions: int,
        train_samples: int,
        clusters: Sequence[int] = (3000, 3000, 3000),
        iterations: int = 10,
        temperature: float = 0.1,
        memory_views: int = 2,
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, clusters=min(clusters, default=0), memory_views=memory_views)
        check_positive(iterations=iterations, temperature=temperature)
        if max(clusters) > train_samples:
            raise ValueError(
                f"clusters = {list(clusters)}: the training data has only {train_samples} samples"
            )
        self.clusters = list(clusters)
        self.temperature = temperature
        self.iterations = iterations
        self._world = world or World()
        self._places = torch.zeros(0, dtype=torch.int64)
        self.register_buffer("memory", torch.zeros(memory_views, train_samples, dimensions))
        self.register_buffer("is_filled", torch.zeros(train_samples, dtype=torch.bool))
        assignments = torch.full((len(clusters), train_samples), -1)
        self.register_buffer("assignments", assignments)
        self.register_buffer("centroids", normalize(torch.randn(sum(clusters), dimensions), dim=1))

    def select_samples(self, places: Tensor) -> None:
        """Set the places of the samples of the next batch in the training data, int64 `(N,)`."""
        self._places = places

    def needs_fill(self) -> bool:
        """Return whether no sample is in the memory."""
        return not bool(self.is_filled.any())

    @torch.no_grad()
    def begin_epoch(self, seed: int) -> None:
        """Find the clusters of the memory."""
        rows = self.is_filled.nonzero()[:, 0]
        for number, centroids in enumerate(torch.split(self.centroids, self.clusters)):
            embeddings = self.memory[number % len(self.memory), rows]
            centers = find_clusters(
                embeddings, len(centroids), self.iterations, seed + number, spherical=True
            )
            centroids.copy_(centers)
            self.assignments[number, rows] = assign_rows(embeddings, centers)

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this rank, a scalar, of views `(N, D)`."""
        check_views(views)
        embeddings = [normalize(view, dim=1) for view in views]
        losses = []
        for number, centroids in enumerate(torch.split(self.centroids, self.clusters)):
            if self.training:
                assigned = self.assignments[number, self._places]
            else:
                assigned = assign_rows(embeddings[0], centroids)
            counts = assigned >= 0
            for embedding in embeddings:
                logs = log_softmax(embedding @ centroids.T / self.temperature, dim=1)
                terms = logs.gather(1, assigned.clamp_min(0)[:, None])[:, 0]
                losses.append(-(terms * counts).sum())
        if self.training:
            self._remember(embeddings)
        return torch.stack(losses).mean() / max(len(views[0]), 1)

    @torch.no_grad()
    def _remember(self, embeddings: Sequence[Tensor]) -> None:
        stacked = torch.stack([view.detach() for view in embeddings[: len(self.memory)]], dim=1)
        # Of all ranks, so that the clusters do not depend on which rank has read a sample.
        everyone, _ = gather_embeddings(self._world, stacked, equal=True)
        places = gather_rows(self._world, self._places)
        self.memory[:, places] = everyone.transpose(0, 1).to(self.memory)
        self.is_filled[places] = True
