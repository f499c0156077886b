"""Barlow Twins against its formula in float64."""

import pytest
import torch
from torch import Tensor

from phasetrain.addons.vision.self_supervised_losses.barlow_twins import BarlowTwins


def direct(one: Tensor, other: Tensor, off_diagonal: float) -> float:
    """Return equations 1 and 2 of the paper, entry by entry."""

    def standard(view: Tensor) -> Tensor:
        columns = [(c - c.mean()) / (((c - c.mean()) ** 2).mean() + 1e-5) ** 0.5 for c in view.T]
        return torch.stack(columns, dim=1)

    a, b = standard(one), standard(other)
    total = 0.0
    for i in range(a.shape[1]):
        for j in range(b.shape[1]):
            c = float((a[:, i] * b[:, j]).mean())
            total += (1 - c) ** 2 if i == j else off_diagonal * c**2
    return total


def views(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(count)]


def test_loss_equals_the_formula() -> None:
    one, other = views()
    assert BarlowTwins(0.01)([one, other]).item() == pytest.approx(
        direct(one, other, 0.01), abs=1e-12
    )
    assert BarlowTwins(0.01, scale=0.5)([one, other]).item() == pytest.approx(
        direct(one, other, 0.01) / 2, abs=1e-12
    )


def test_joint_standardisation_equals_the_formula() -> None:
    one, other = views()
    both = torch.cat([one, other])
    mean = both.mean(dim=0)
    deviation = ((both**2).mean(dim=0) - mean**2 + 1e-5).sqrt()  # as VISSL computes it
    total = 0.0
    for i in range(4):
        for j in range(4):
            a = (one[:, i] - mean[i]) / deviation[i]
            b = (other[:, j] - mean[j]) / deviation[j]
            c = float((a * b).sum()) / 6
            total += (1 - c) ** 2 if i == j else 0.01 * c**2
    found = BarlowTwins(0.01, joint=True)([one, other]).item()
    assert found == pytest.approx(total, abs=1e-12)
    assert found != pytest.approx(direct(one, other, 0.01), abs=1e-3)


def test_more_views_give_the_mean_over_pairs() -> None:
    first, second, third = views(3)
    expected = (
        sum(direct(*pair, 0.1) for pair in ((first, second), (first, third), (second, third))) / 3
    )
    assert BarlowTwins(0.1)([first, second, third]).item() == pytest.approx(expected, abs=1e-12)


def test_equal_views_with_independent_dimensions_have_no_loss() -> None:
    view = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    assert BarlowTwins()([view, view]).item() == pytest.approx(0, abs=1e-8)
    assert BarlowTwins()([view, -view]).item() == pytest.approx(8, abs=1e-3)


def test_invalid_parameters_and_views_are_rejected() -> None:
    with pytest.raises(ValueError, match="off_diagonal = -1:"):
        BarlowTwins(-1)
    with pytest.raises(ValueError, match=r"\(6, 4\)|views"):
        BarlowTwins()(views(1))
