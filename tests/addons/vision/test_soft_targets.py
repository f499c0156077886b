"""Soft targets against a direct computation in float64."""

import math

import pytest
import torch

from phasetrain.addons.vision.soft_targets import SoftTargets


def test_loss_equals_the_formula() -> None:
    student, teacher = (
        torch.tensor([[1.0, 3.0], [0.0, 0.0]]),
        torch.tensor([[2.0, -2.0], [0.0, 4.0]]),
    )
    expected = 0.0
    for row in range(2):
        p, q = probabilities(teacher[row].tolist(), 2.0), probabilities(student[row].tolist(), 2.0)
        expected += (
            4.0 * sum(one * math.log(one / other) for one, other in zip(p, q, strict=True)) / 2
        )
    assert float(SoftTargets(2.0)(student.double(), teacher.double())) == pytest.approx(
        expected, rel=1e-12
    )


def probabilities(scores: list[float], temperature: float) -> list[float]:
    powers = [math.exp(score / temperature) for score in scores]
    return [power / sum(powers) for power in powers]


def test_equal_scores_have_nothing_to_teach() -> None:
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert float(SoftTargets()(scores, scores + 7)) == pytest.approx(0.0, abs=1e-6)


def test_mean_is_over_all_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 4, generator=generator) for _ in range(2))
    whole = SoftTargets()(student, teacher)
    torch.testing.assert_close(whole, SoftTargets()(student.reshape(6, 4), teacher.reshape(6, 4)))


def test_high_temperature_limit_is_the_mean_square_of_centered_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = (
        torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    apart = (student - student.mean(1, keepdim=True)) - (teacher - teacher.mean(1, keepdim=True))
    torch.testing.assert_close(
        SoftTargets(1e4)(student, teacher),
        apart.square().sum(1).mean() / (2 * 4),
        rtol=1e-3,
        atol=0,
    )


def test_invalid_temperature_and_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"temperature = 0:"):
        SoftTargets(0)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        SoftTargets()(torch.zeros(2, 4), torch.zeros(2, 3))
