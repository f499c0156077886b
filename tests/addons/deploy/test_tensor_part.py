"""Which transforms an exported model contains."""

from typing import Any

import pytest
import torch
from torch import nn

from phasetrain.addons.deploy.tensor_part import TransformedModel, split_tensor_part
from phasetrain.data.transforms import Keys, Noise, Normalize, Pipeline, RandomShift, Resize

NORMALIZE = Normalize([0.5], [0.25])


@pytest.mark.parametrize(
    ("transforms", "inside"),
    [
        ([Resize(4), NORMALIZE], 2),
        ([RandomShift(1), NORMALIZE], 1),
        ([NORMALIZE, Noise(0.1)], 0),
        ([lambda x: x, Resize(4)], 1),
    ],
)
def test_tensor_operations_at_the_end_go_into_an_exported_model(
    transforms: list[Any], inside: int
) -> None:
    before, taken = split_tensor_part(transforms)
    assert (before, taken) == (transforms[: len(before)], transforms[len(before) :])
    assert len(taken) == inside
    model = TransformedModel(taken, nn.Flatten())
    expected = Pipeline(taken)(torch.rand(2, 1, 8, 8), Keys([0, 1])).flatten(1)
    assert model(torch.rand(2, 1, 8, 8)).shape == expected.shape
