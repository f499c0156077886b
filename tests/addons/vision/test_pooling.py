"""Pooling before a head."""

import pytest
import torch
from torch import nn

from phasetrain.addons.vision.pooling import make_pooling

MAPS = torch.arange(2 * 1 * 4 * 4.0).view(2, 1, 4, 4)


@pytest.mark.feature(
    "model.pooling",
    "pooled and concatenated layers; probes with batch norm",
    "`MODEL.heads.*.pool`, `from`, `norm`; `mlp` with `input_norm`",
)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, [[[7.5]]]),
        ([2, 1], [[[3.5], [11.5]]]),
        ({"size": [1, 2], "kind": "max"}, [[[13.0, 15.0]]]),
        ({"kernel": 2}, [[[2.5, 4.5], [10.5, 12.5]]]),
        ({"kernel": [2, 2], "stride": 2, "padding": 1, "kind": "max"}, None),
        ({"kernel": 3, "stride": 1}, [[[5.0, 6.0], [9.0, 10.0]]]),
        ("mean", [7.5]),
    ],
)
def test_maps_are_pooled(given, expected) -> None:
    found = make_pooling(given)(MAPS)[0]
    if expected is None:
        expected = nn.MaxPool2d(2, 2, 1)(MAPS)[0].tolist()
    assert found.tolist() == expected


def test_first_selects_the_first_token() -> None:
    tokens = torch.randn(2, 5, 3)
    assert torch.equal(make_pooling("first")(tokens), tokens[:, 0])
    with pytest.raises(ValueError, match=r"heads\.probe\.pool = 'first'.*tokens"):
        make_pooling("first", "heads.probe.pool")(MAPS)


@pytest.mark.parametrize(
    "given",
    ["last", [1, 2, 3], [0, 1], {}, {"kind": "max"}, {"size": 2, "stride": 1}, {"kernel": 0}],
)
def test_other_values_are_rejected(given) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        make_pooling(given)
