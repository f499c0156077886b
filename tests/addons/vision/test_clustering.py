"""k-means against scikit-learn from the same start, and what it does at the edges."""

import pytest
import torch
from sklearn.cluster import KMeans

from phasetrain.addons.vision import clustering
from phasetrain.addons.vision.clustering import assign_rows, find_clusters

ROWS = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def start(clusters: int, seed: int) -> torch.Tensor:
    return ROWS[torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:clusters]]


@pytest.mark.feature("cluster")
def test_centroids_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustering, "CHUNK", 7)
    found = find_clusters(ROWS, 5, 4, seed=3)
    other = KMeans(5, init=start(5, 3).numpy(), n_init=1, max_iter=4, tol=0).fit(ROWS.numpy())
    torch.testing.assert_close(found, torch.from_numpy(other.cluster_centers_))
    assert assign_rows(ROWS, found).tolist() == other.predict(ROWS.numpy()).tolist()


def test_spherical_centroids_have_norm_one_and_seeds_differ() -> None:
    found = find_clusters(ROWS, 5, 3, seed=3, spherical=True)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(found, find_clusters(ROWS, 5, 3, seed=3, spherical=True))
    assert not torch.equal(found, find_clusters(ROWS, 5, 3, seed=4, spherical=True))


def test_centroid_without_rows_stays_and_too_few_rows_are_rejected() -> None:
    twice = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert find_clusters(twice, 2, 2, seed=0).tolist() == twice.tolist()
    with pytest.raises(ValueError, match=r"3 clusters: .* 2 samples"):
        find_clusters(twice, 3, 2, seed=0)
