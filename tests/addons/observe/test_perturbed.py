"""Noise keeps the range of outputs, and a perturbed loss leaves the loss as it was."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from phasetrain.addons.observe.perturbed import perturb_loss, perturb_tensors


@pytest.mark.parametrize(
    ("tensor", "low", "high"),
    [
        (torch.zeros(8, 2), 0.0, 2.0),
        (torch.linspace(0, 1, 16), 0.0, 1.0),
        (torch.tensor(0.5), 0.0, 1.0),
        (torch.full((16,), 4.0), 2.0, 6.0),
        (torch.full((16,), -4.0), -6.0, -2.0),
        (torch.tensor([-1.0, 1.0] * 8), -3.0, 3.0),
    ],
)
def test_noise_has_the_scale_of_the_tensor(tensor: Tensor, low: float, high: float) -> None:
    perturbed = perturb_tensors({"a": tensor}, torch.Generator().manual_seed(0))["a"]
    assert low <= float(perturbed.min()) <= float(perturbed.max()) <= high
    assert not torch.equal(perturbed, tensor)


def test_other_numbers_are_kept() -> None:
    values = [torch.arange(3), torch.zeros(0), torch.tensor([True])]
    perturbed = perturb_tensors(values, torch.Generator().manual_seed(0))
    assert all(map(torch.equal, perturbed, values))


class Moving(nn.Module):
    """Has a parameter, a buffer that each call moves, and a value of the schedule."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(()))
        self.where = 0.0

    def advance(self, where: float, updates: int) -> None:
        self.where = where

    def forward(self) -> Tensor:
        self.count += 1
        return self.scale.sum()


def test_perturbed_loss_is_a_copy_of_a_later_update() -> None:
    loss = Moving()
    before = deepcopy(loss.state_dict())
    generator = torch.Generator().manual_seed(0)
    later = perturb_loss(loss, lambda part: part(), 0.5, 7, generator)
    assert isinstance(later, Moving)
    assert later.where == 0.5
    assert 1.0 <= float(later.count) <= 3.0
    assert bool((later.scale > 0).all())
    assert loss.where == 0.0
    assert all(torch.equal(value, before[key]) for key, value in loss.state_dict().items())
