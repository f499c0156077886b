"""NT-Xent against its formula, term by term in float64."""

import math

import pytest
import torch
from torch import Tensor

from phasetrain.addons.vision.self_supervised_losses.simclr import SimCLR
from phasetrain.losses import LOSSES


def views(count: int = 2, rows: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(rows, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(count)
    ]


def direct(one: Tensor, other: Tensor, temperature: float) -> Tensor:
    """Return equation 1 of the paper, averaged over the 2 N anchors."""
    rows = [row / row.norm() for row in torch.cat([one, other])]
    count, terms = len(one), []
    for i in range(2 * count):
        partner = (i + count) % (2 * count)
        others = [torch.exp(rows[i] @ rows[k] / temperature) for k in range(2 * count) if k != i]
        terms.append(
            -torch.log(torch.exp(rows[i] @ rows[partner] / temperature) / torch.stack(others).sum())
        )
    return torch.stack(terms).mean()


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_loss_equals_the_formula(temperature: float) -> None:
    one, other = views()
    expected = direct(one, other, temperature)
    found = SimCLR(temperature)([one, other])
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    gradients = [torch.autograd.grad(loss, [one, other]) for loss in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_more_views_give_the_mean_over_pairs() -> None:
    first, second, third = views(3)
    pairs = [(first, second), (first, third), (second, third)]
    expected = sum(direct(one, other, 0.2).item() for one, other in pairs) / 3
    assert SimCLR(0.2)([first, second, third]).item() == pytest.approx(expected, abs=1e-12)


def test_equal_views_of_opposite_samples_have_a_known_loss() -> None:
    view = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    expected = math.log(
        1 + 2 * math.exp(-2 / 0.5)
    )  # one partner at cosine 1, two others at cosine -1
    assert SimCLR(0.5)([view, view]).item() == pytest.approx(expected, abs=1e-12)


def test_rank_without_samples_has_loss_zero() -> None:
    assert SimCLR().eval()([torch.zeros(0, 4), torch.zeros(0, 4)]).item() == 0


@pytest.mark.parametrize(
    "given", [[torch.ones(2, 3)], torch.ones(2, 3), [torch.ones(2, 3), torch.ones(3, 3)]]
)
def test_input_other_than_a_list_of_views_is_rejected(given: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="views"):
        SimCLR()(given)


def test_loss_is_coupled_and_has_no_teacher() -> None:
    loss = LOSSES.build("simclr", {"temperature": 0.3})
    assert isinstance(loss, SimCLR)
    assert (loss.coupled, loss.uses_teacher) == (True, False)
    with pytest.raises(ValueError, match="temperature = 0:"):
        SimCLR(0)
