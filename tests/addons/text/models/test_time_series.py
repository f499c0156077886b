"""Convolutions over time."""

import pytest
import torch
from torch import nn

from phasetrain.addons.text.models import SeriesFCN, SeriesResNet


def count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("kind", [SeriesFCN, SeriesResNet])
def test_any_length_gives_scores_of_classes(kind: type[nn.Module]) -> None:
    model = kind(3, 5).eval()
    assert [model(torch.randn(2, 3, length)).shape for length in (9, 150)] == [(2, 5)] * 2


def test_sizes_are_those_of_the_papers() -> None:
    # Kernels x channels of the convolutions, two numbers per channel of a batch norm, the head.
    assert count(SeriesFCN(1, 2)) == 8 * 128 + 5 * 128 * 256 + 3 * 256 * 128 + 1024 + 258
    resnet = 64 * (8 + 5 * 64 + 3 * 64 + 1) + 128 * (8 * 64 + (5 + 3) * 128 + 64)
    resnet += 128 * (8 + 5 + 3) * 128 + 4 * 2 * 64 + 8 * 2 * 128 + 258
    assert count(SeriesResNet(1, 2)) == resnet


def test_bad_widths_are_rejected() -> None:
    with pytest.raises(ValueError, match="three"):
        SeriesFCN(1, 2, widths=[8, 8])
    with pytest.raises(ValueError, match="width"):
        SeriesResNet(1, 2, width=0)
