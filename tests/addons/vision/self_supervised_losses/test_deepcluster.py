"""The memory of DeepCluster v2, samples without a cluster, and tests."""

import pytest
import torch
from torch import Tensor

from phasetrain.addons.vision.self_supervised_losses.deepcluster import DeepClusterV2


def rows(seed: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def filled(samples: int = 5) -> DeepClusterV2:
    loss = DeepClusterV2(3, samples, clusters=[2, 2], iterations=3)
    loss.select_samples(torch.tensor([4, 0, 2, 1]))
    loss([rows(0), rows(1), rows(2)])
    return loss


def test_memory_has_the_first_views_at_the_place_of_each_sample() -> None:
    loss = filled()
    assert loss.is_filled.tolist() == [True, True, True, False, True]
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(loss.memory[1, [4, 0, 2, 1]], unit(rows(1)))
    assert loss.memory[:, 3].count_nonzero() == 0


def test_only_samples_in_the_memory_get_a_cluster_and_a_term() -> None:
    loss = filled()
    loss.begin_epoch(0)
    assert (loss.assignments >= 0).tolist() == [[True, True, True, False, True]] * 2
    loss.select_samples(torch.tensor([3, 3, 3, 0]))
    views = [rows(3).requires_grad_(), rows(4)]
    value = loss(views)
    (gradient,) = torch.autograd.grad(value, views[0])
    assert value > 0
    assert gradient[:3].count_nonzero() == 0
    assert gradient[3].count_nonzero() > 0


def test_clusters_depend_on_the_seed_and_take_the_views_in_turns() -> None:
    torch.manual_seed(0)
    loss = DeepClusterV2(3, 40, clusters=[4, 4, 4], iterations=1)
    loss.select_samples(torch.arange(40))
    loss([rows(0, 40), rows(1, 40)])
    found = []
    for seed in (0, 0, 1):
        loss.begin_epoch(seed)
        found.append(loss.centroids.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert loss.assignments.unique(dim=0).shape[0] == 3


def test_a_test_uses_the_nearest_cluster_and_changes_nothing() -> None:
    loss = filled().eval()
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    near = loss.centroids[:2] * 3
    value = loss([near, near])
    scores = loss.centroids @ loss.centroids[:2].T
    expected = -scores.div(0.1).split(2)[0].log_softmax(dim=0).diagonal().mean()
    other = -(scores[2:] / 0.1).log_softmax(dim=0).max(dim=0).values.mean()
    torch.testing.assert_close(value, (expected + other) / 2)
    assert all(torch.equal(before[key], value) for key, value in loss.state_dict().items())


def test_more_clusters_than_samples_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"clusters = \[2, 6\]: .* 5 samples"):
        DeepClusterV2(3, 5, clusters=[2, 6])
