"""k-means of embeddings, the same on every rank and in every run."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

CHUNK = 4096
"""Rows that are compared with the centroids at once."""


@torch.no_grad()
def find_clusters(
    rows: Tensor, clusters: int, iterations: int, seed: int, *, spherical: bool = False
) -> Tensor:
    """Return the centroids `(clusters, D)` of rows `(N, D)` by Lloyd's algorithm.

    It starts from different rows that the seed selects. A centroid without rows stays where it is.

    Args:
        rows: at least as many as clusters.
        clusters: number of clusters.
        iterations: number of assignments and moves of the centroids.
        seed: selects the first centroids.
        spherical: normalise the centroids, so that rows are compared by cosine.

    Raises:
        ValueError: there are fewer rows than clusters.
    """
    if len(rows) < clusters:
        raise ValueError(f"{clusters} clusters: there are only {len(rows)} samples to cluster")
    # On the CPU, because a CUDA generator draws another permutation from the same seed.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    centroids = rows[order[:clusters].to(rows.device)]
    for _ in range(iterations):
        sums = torch.zeros_like(centroids)
        counts = centroids.new_zeros(clusters, 1)
        for part in torch.split(rows, CHUNK):
            # A product instead of index_add, whose order of additions is not fixed on CUDA.
            members = torch.nn.functional.one_hot(assign_rows(part, centroids), clusters)
            sums += members.T.to(part) @ part
            counts += members.sum(dim=0)[:, None]
        centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
        if spherical:
            centroids = normalize(centroids, dim=1)
    return centroids


@torch.no_grad()
def assign_rows(rows: Tensor, centroids: Tensor) -> Tensor:
    """Return the index of the nearest centroid of each row `(N, D)`, int64 `(N,)`; the lower index
    wins a tie."""
    # Of |row - centroid|^2 only the terms that differ between centroids.
    offsets = centroids.square().sum(dim=1) / 2
    parts = [part @ centroids.T - offsets for part in torch.split(rows, CHUNK)]
    return torch.cat([scores.argmax(dim=1) for scores in parts])
