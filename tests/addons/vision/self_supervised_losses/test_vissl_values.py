"""Losses equal VISSL's: expected values were computed once with its loss files on these inputs."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from phasetrain.losses import LOSSES


def rows(seed: int, count: int = 8, width: int = 6) -> Tensor:
    """Return embeddings that no generator has drawn, so that they are the same everywhere."""
    angles = torch.arange(count * width, dtype=torch.float64) * (0.37 * (seed + 1)) + seed
    return torch.sin(angles).float().view(count, width)


def views(*seeds: int) -> list[Tensor]:
    return [rows(seed) for seed in seeds]


def test_simclr() -> None:
    loss = LOSSES.build("simclr", {"temperature": 0.1})
    assert loss(views(0, 1), None).item() == pytest.approx(10.119626998901367, abs=1e-5)


@pytest.mark.feature("vissl")
@pytest.mark.parametrize(
    ("power_law", "expected"), [(0, 1.800754189491272), (0.25, 1.7931127548217773)]
)
def test_swav_and_clusters_that_follow_a_power_law(power_law: float, expected: float) -> None:
    params = {"temperature": 0.1, "epsilon": 0.05, "iterations": 3, "prototypes": 5}
    params["power_law"] = power_law
    loss = LOSSES.build("swav", params, facts={"dimensions": 6, "batch_size": 8})
    loss.prototypes.data.copy_(normalize(rows(9, 5)))
    assert loss(views(0, 1, 2, 3), None).item() == pytest.approx(expected, abs=1e-5)


def test_dino_and_its_center() -> None:
    params = {"student_temperature": 0.1, "teacher_temperature": 0.07, "warmup": 0.0}
    loss = LOSSES.build("dino", params, facts={"dimensions": 6})
    students = views(0, 1, 2, 3)
    assert loss(students, views(10, 11)).item() == pytest.approx(8.672012329101562, abs=1e-5)
    assert loss(students, views(12, 13)).item() == pytest.approx(6.581449031829834, abs=1e-5)
    expected = [-0.019573424, -0.045582574, -0.007252283, 0.038861431, 0.028778605, -0.002960156]
    torch.testing.assert_close(loss.center, torch.tensor(expected), atol=1e-6, rtol=0)


def test_moco_in_one_direction_and_its_queue() -> None:
    params = {"queue": 16, "temperature": 0.2, "symmetric": False}
    loss = LOSSES.build("moco", params, facts={"dimensions": 6, "batch_size": 8})
    loss.queue.copy_(normalize(rows(20, 16)))
    found = loss(views(0, 4), views(5, 1))
    assert found.item() == pytest.approx(3.485790491104126, abs=1e-5)
    assert loss(views(2, 4), views(5, 3)).item() == pytest.approx(5.63722038269043, abs=1e-5)


def test_barlow_twins_of_both_views_together() -> None:
    params = {"off_diagonal": 0.0051, "scale": 0.024, "joint": True}
    loss = LOSSES.build("barlow_twins", params)
    assert loss(views(0, 1), None).item() == pytest.approx(0.18665815889835358, abs=1e-5)


@pytest.mark.feature("loss.memory")
def test_deepcluster_and_its_clusters() -> None:
    facts = {"dimensions": 6, "train_samples": 8}
    loss = LOSSES.build("deepcluster_v2", {"clusters": [3, 2]}, facts=facts)
    loss.select_samples(torch.tensor([3, 0, 1, 2, 7, 6, 5, 4]))
    loss(views(0, 1, 2), None)
    loss.begin_epoch(5)
    expected = [[2, 1, 0, 0, 2, 0, 1, 2], [1, 1, 0, 0, 0, 0, 1, 0]]
    assert loss.assignments.tolist() == expected
    assert loss(views(3, 4, 5), None).item() == pytest.approx(2.2981467247009277, abs=1e-5)


@pytest.mark.feature(
    "loss.memory",
    "a memory of all samples: DeepCluster v2 with k-means in each epoch, NPID",
    "`LOSS.name=deepcluster_v2`, `npid`",
)
@pytest.mark.parametrize(
    ("contrast", "expected"),
    [
        ("nce", [3.7725887298583984, 17.178543090820312]),
        ("cross_entropy", [2.753004550933838, 8.748350143432617]),
    ],
)
def test_npid_and_its_memory(contrast: str, expected: list[float]) -> None:
    params = {"negatives": 5, "temperature": 0.07, "contrast": contrast}
    loss = LOSSES.build("npid", params, facts={"dimensions": 6, "train_samples": 12})
    loss.memory.copy_(normalize(rows(20, 12)))
    drawn = (torch.arange(48) * 7 % 12).view(8, 6)[:, 1:]
    loss._draw_negatives = lambda count: drawn
    for seed, value in zip((0, 2), expected, strict=True):
        loss.select_samples(torch.tensor([3, 0, 7, 11, 5, 1, 9, 2]))
        assert loss([rows(seed)]).item() == pytest.approx(value, abs=2e-5)
    moved = [0.51068282, -0.17367479, -0.34515303, 0.18433475, 0.57842839, 0.47047940]
    torch.testing.assert_close(loss.memory[3], torch.tensor(moved), atol=1e-6, rtol=0)
    if contrast == "nce":
        assert loss.partition.item() == pytest.approx(24.420032501220703, abs=1e-5)


@pytest.mark.feature(
    "loss.view_distillation",
    "distillation of a self-supervised teacher over views",
    "`TASK.teacher`, `LOSS.name=view_distillation`",
)
@pytest.mark.parametrize(
    ("swapped", "expected"), [(False, 8.753036499023438), (True, 8.672012329101562)]
)
def test_distillation_of_a_dino_teacher(swapped: bool, expected: float) -> None:
    loss = LOSSES.build("view_distillation", {"swapped": swapped})
    assert loss(views(0, 1, 2, 3), views(10, 11)).item() == pytest.approx(expected, abs=1e-5)
