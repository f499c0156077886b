"""Models of other libraries get plain parameters, mappings as keywords, and a selected output."""

from collections import namedtuple
from types import MappingProxyType

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.addons.libraries.models.model_calls import (
    MappingSpreader,
    OutputSelector,
    PositionalSelector,
    check_params,
)
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.nested import to_plain
from phasetrain.errors import ConfigError

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


def test_mapping_is_spread_with_its_first_parameter_positional() -> None:
    spread = MappingSpreader("a")
    mapping = MappingProxyType({"c": 3, "a": 1})
    assert spread(nn.Identity(), (mapping,), {"b": 2}) == ((1,), {"c": 3, "b": 2})
    assert spread(nn.Identity(), (MappingProxyType({"c": 3}),), {}) == ((None,), {"c": 3})
    assert spread(nn.Identity(), (ONE,), {"b": 2}) == ((ONE,), {"b": 2})
    assert spread(nn.Identity(), (), {"a": mapping}) == ((), {"a": mapping})


def test_output_is_selected_for_a_positional_argument_only() -> None:
    select = PositionalSelector(OutputSelector("second"))
    output = Both(ONE, OTHER)
    assert select(nn.Identity(), (ONE,), {}, output) is OTHER
    assert select(nn.Identity(), (), {"a": ONE}, output) is output


def test_parameters_are_plain_containers_without_pretrained_weights() -> None:
    config = AttrDict({"a": {"b": [1, {"c": 2}]}})
    assert to_plain(config) == {"a": {"b": [1, {"c": 2}]}}
    assert [
        type(to_plain(config)["a"]),
        type(to_plain(config)["a"]["b"]),
    ] == [dict, list]
    assert check_params(config, ["weights"], pretrained=False) == {"a": {"b": [1, {"c": 2}]}}
    assert check_params({"weights": None}, ["weights"], pretrained=False) == {"weights": None}
    with raises(ConfigError, key="MODEL.params.weights"):
        check_params({"weights": "best"}, ["weights"], pretrained=False)
