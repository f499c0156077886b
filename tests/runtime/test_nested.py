"""Walks over nested tensors keep containers, their order, and what is not a tensor."""

from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from phasetrain.runtime.nested import list_tensors, map_tensors


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


def test_map_keeps_the_structure() -> None:
    value = {"b": [torch.ones(1), (torch.ones(2), "x")], "a": Pair(torch.ones(3), "n"), "c": None}
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert list(doubled) == ["b", "a", "c"]
    assert doubled["b"][0].tolist() == [2.0]
    assert doubled["b"][1][0].tolist() == [2.0, 2.0]
    assert (type(doubled["b"][1]), doubled["b"][1][1], doubled["c"]) == (tuple, "x", None)
    assert isinstance(doubled["a"], Pair)
    assert doubled["a"].image.tolist() == [2.0, 2.0, 2.0]
    assert value["b"][0].tolist() == [1.0]


def test_other_leaves_can_be_changed() -> None:
    changed = map_tensors([np.ones(2), torch.zeros(1)], torch.from_numpy, np.ndarray)
    assert [tensor.tolist() for tensor in changed] == [[1.0, 1.0], [0.0]]


@pytest.mark.parametrize(
    ("value", "any_mapping", "kind", "entry"),
    [
        ({"x": torch.ones(1)}, False, dict, 3.0),
        (UserDict(x=torch.ones(1)), False, UserDict, 1.0),
        (UserDict(x=torch.ones(1)), True, dict, 3.0),
    ],
)
def test_mappings_of_other_classes_are_kept_unless_asked_for(
    value: Any, any_mapping: bool, kind: type, entry: float
) -> None:
    changed = map_tensors(value, lambda tensor: tensor * 3, any_mapping=any_mapping)
    assert (type(changed), changed["x"].item()) == (kind, entry)


def test_list_has_the_tensors_in_their_order() -> None:
    first, second, third = torch.zeros(1), torch.ones(2), torch.ones(3)
    value = {"b": first, "a": [second, (UserDict(x=third), "text")], "c": None}
    assert [
        tensor is other
        for tensor, other in zip(list_tensors(value), (first, second, third), strict=True)
    ] == [True, True, True]
    assert list_tensors(first)[0] is first
    assert list_tensors("text") == []
