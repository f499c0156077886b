"""Models of other libraries get plain parameters, mappings as keywords, and a selected output."""

from collections import namedtuple
from types import MappingProxyType

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError
from phasetrain.models.bridges.base import (
    OutputSelector,
    check_params,
    spread_mapping,
    to_plain_containers,
)

Both = namedtuple("Both", ["first", "second"])
ONE, OTHER = torch.zeros(1), torch.ones(2)


@pytest.mark.parametrize("output", [{"first": ONE, "second": OTHER}, Both(ONE, OTHER)])
def test_output_is_selected_by_name(output: object) -> None:
    module = nn.Identity()
    assert OutputSelector("second")(module, (), output) is OTHER
    assert OutputSelector(None)(module, (), output) == {"first": ONE, "second": OTHER}
    assert OutputSelector("second")(module, (), ONE) is ONE
    with raises(ConfigError, key="MODEL.output", suggestion="second"):
        OutputSelector("secnd")(module, (), output)


def test_mapping_is_passed_as_keywords() -> None:
    assert spread_mapping(nn.Identity(), (MappingProxyType({"a": 1}),), {"b": 2}) == (
        (),
        {"a": 1, "b": 2},
    )
    assert spread_mapping(nn.Identity(), (ONE,), {"b": 2}) == ((ONE,), {"b": 2})


def test_parameters_are_plain_containers_without_pretrained_weights() -> None:
    config = AttrDict({"a": {"b": [1, {"c": 2}]}})
    assert to_plain_containers(config) == {"a": {"b": [1, {"c": 2}]}}
    assert [
        type(to_plain_containers(config)["a"]),
        type(to_plain_containers(config)["a"]["b"]),
    ] == [dict, list]
    assert check_params(config, ["weights"], pretrained=False) == {"a": {"b": [1, {"c": 2}]}}
    assert check_params({"weights": None}, ["weights"], pretrained=False) == {"weights": None}
    with raises(ConfigError, key="MODEL.params.weights"):
        check_params({"weights": "best"}, ["weights"], pretrained=False)
