"""Parameters, inputs and outputs of models of other libraries."""

from collections import namedtuple
from types import MappingProxyType

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError
from phasetrain.models.bridges.base import Selected, by_keywords, free, plain

Both = namedtuple("Both", ["first", "second"])
ONE, OTHER = torch.zeros(1), torch.ones(2)


@pytest.mark.parametrize("output", [{"first": ONE, "second": OTHER}, Both(ONE, OTHER)])
def test_outputs_by_name(output: object) -> None:
    module = nn.Identity()
    assert Selected("second")(module, (), output) is OTHER
    assert Selected(None)(module, (), output) == {"first": ONE, "second": OTHER}
    assert Selected("second")(module, (), ONE) is ONE
    with raises(ConfigError, key="MODEL.output", suggestion="second"):
        Selected("secnd")(module, (), output)


def test_a_mapping_is_spread_over_keywords() -> None:
    assert by_keywords(nn.Identity(), (MappingProxyType({"a": 1}),), {"b": 2}) == (
        (),
        {"a": 1, "b": 2},
    )
    assert by_keywords(nn.Identity(), (ONE,), {"b": 2}) == ((ONE,), {"b": 2})


def test_parameters_are_the_library_s_to_change() -> None:
    config = AttrDict({"a": {"b": [1, {"c": 2}]}})
    assert plain(config) == {"a": {"b": [1, {"c": 2}]}}
    assert [type(plain(config)["a"]), type(plain(config)["a"]["b"])] == [dict, list]
    assert free(config, ["weights"], pretrained=False) == {"a": {"b": [1, {"c": 2}]}}
    assert free({"weights": None}, ["weights"], pretrained=False) == {"weights": None}
    with raises(ConfigError, key="MODEL.params.weights"):
        free({"weights": "best"}, ["weights"], pretrained=False)
