"""DINO against its formula in float64, its center and its temperature."""

import pytest
import torch
from torch import Tensor

from phasetrain.addons.vision.self_supervised_losses.dino import DINO


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def probabilities(row: Tensor, temperature: float) -> Tensor:
    exponents = torch.exp(row / temperature)
    return exponents / exponents.sum()


def direct(
    views: list[Tensor], targets: list[Tensor], center: Tensor, teacher_temperature: float
) -> float:
    terms = [
        float(
            -(
                probabilities(z - center, teacher_temperature) * torch.log(probabilities(s, 0.1))
            ).sum()
        )
        for taught in range(len(targets))
        for view in range(len(views))
        if view != taught
        for s, z in zip(views[view], targets[taught], strict=True)
    ]
    return sum(terms) / len(terms)


def test_loss_equals_the_formula_with_the_center_of_earlier_batches() -> None:
    loss = DINO(6, center_momentum=0.8).double()
    center = torch.zeros(6, dtype=torch.float64)
    for batch in range(3):
        views = [rows(4, 10 * batch + view) for view in range(4)]
        targets = [rows(4, 10 * batch + 5 + view) for view in range(2)]
        assert loss(views, targets).item() == pytest.approx(
            direct(views, targets, center, 0.04), abs=1e-12
        )
        center = 0.8 * center + 0.2 * torch.cat(targets).mean(dim=0)
        torch.testing.assert_close(loss.center, center, atol=1e-14, rtol=0)


def test_center_is_unchanged_in_eval_mode() -> None:
    loss = DINO(6).double().eval()
    loss([rows(4, 1), rows(4, 2)], [rows(4, 3)])
    assert not loss.center.any()


def test_temperature_of_the_teacher_is_a_function_of_progress() -> None:
    loss = DINO(6, teacher_temperature=0.08, warmup_temperature=0.04, warmup=0.5)
    found = []
    for where in (0.0, 0.25, 0.5, 0.9):
        loss.advance(where, 0)
        found.append(loss.teacher_temperature)
    assert found == pytest.approx([0.04, 0.06, 0.08, 0.08])
    assert set(loss.state_dict()) == {"center"}


def test_warmup_can_take_a_number_of_updates() -> None:
    loss = DINO(6, teacher_temperature=0.08, warmup_temperature=0.04, warmup_updates=5)
    temperatures = []
    for updates in (0, 1, 4, 5, 100):
        loss.advance(0.3, updates)
        temperatures.append(loss.teacher_temperature)
    assert temperatures == pytest.approx([0.04, 0.05, 0.08, 0.08, 0.08])
    loss.advance(1.0, 0)
    assert loss.teacher_temperature == 0.08


def test_temperature_is_constant_without_warmup() -> None:
    assert DINO(6, warmup=0.0).teacher_temperature == 0.07


def test_teacher_gets_no_gradient() -> None:
    taught = torch.ones(2, 6, requires_grad=True)
    student = torch.ones(2, 6, requires_grad=True)
    DINO(6)([student, student], [taught]).backward()
    assert taught.grad is None
    assert student.grad is not None


def test_invalid_momentum_and_missing_teacher_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"center_momentum = 2:"):
        DINO(6, center_momentum=2)
    with pytest.raises(ValueError, match=r"TASK\.name=self_supervised"):
        DINO(6)([rows(2, 1), rows(2, 2)])
