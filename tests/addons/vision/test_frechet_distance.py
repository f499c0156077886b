"""Fréchet distance of features: closed forms, ranks together, outputs without features."""

import math

import pytest
import torch

from phasetrain.addons.vision.frechet_distance import FrechetDistance, frechet_distance
from phasetrain.engine.batch import GeneratedOutput, StepOutput


def features(*columns: tuple[float, float]) -> torch.Tensor:
    """Return independent columns with given means and standard deviations, exactly."""
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    scale = math.sqrt(3 / 4)  # of the unbiased variance of four signs
    found = [mean + sd * scale * signs[:, place] for place, (mean, sd) in enumerate(columns)]
    return torch.stack(found, dim=1)


def output(generated: torch.Tensor, real: torch.Tensor) -> GeneratedOutput:
    size = len(generated)
    return GeneratedOutput(torch.zeros(()), size, size, features=generated, real_features=real)


@pytest.mark.feature("gan")
def test_distance_is_that_of_normal_distributions() -> None:
    one = features((0.0, 1.0), (2.0, 3.0))
    other = features((4.0, 2.0), (2.0, 1.0))
    assert frechet_distance(one, other) == pytest.approx(16 + (1 - 2) ** 2 + (3 - 1) ** 2)
    assert frechet_distance(one, one) == pytest.approx(0.0, abs=1e-12)
    assert frechet_distance(one[:, :1], other[:, :1]) == pytest.approx(17.0)


def test_covariance_counts() -> None:
    torch.manual_seed(0)
    rows = torch.randn(500, 2)
    turned = rows @ torch.tensor([[1.0, 0.9], [0.0, 0.5]])
    assert frechet_distance(rows, turned) == pytest.approx(frechet_distance(turned, rows))
    assert frechet_distance(rows, turned) > 0.1


def test_ranks_together_have_the_value_of_one() -> None:
    torch.manual_seed(0)
    generated, real = torch.randn(2, 12, 3)
    whole, first, second = FrechetDistance(), FrechetDistance(), FrechetDistance()
    whole.update(output(generated, real))
    first.update(output(generated[:5], real[:5]))
    second.update(output(generated[5:], real[5:]))
    merged = FrechetDistance()
    merged.merge_buffers([dict(one.named_buffers()) for one in (first, second)])
    assert merged.compute() == whole.compute() > 0


def test_samples_that_do_not_count_are_skipped_and_nothing_is_nan() -> None:
    meter = FrechetDistance()
    assert math.isnan(meter.compute())
    out = output(features((0.0, 1.0)), features((0.0, 1.0)))
    out.mask = torch.tensor([True, False, False, False])
    meter.update(out)
    assert math.isnan(meter.compute())


def test_output_without_features_is_rejected() -> None:
    with pytest.raises(ValueError, match="splits"):
        FrechetDistance().update(StepOutput(torch.zeros(()), 1, 1))
