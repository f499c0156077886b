"""Two states are equal when their bits are."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from phasetrain.proof.digest import digest_leaves
from phasetrain.testing import differences

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
        (torch.arange(6).view(2, 3)[:1, 2], torch.tensor([2])),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        ({"a": (NAN, None, "x")}, OrderedDict(a=(NAN, None, "x"))),
        (np.float64(0.5), 0.5),
        (np.arange(3), np.arange(3)),
    ],
)
def test_equal_values_have_no_differences(one: Any, other: Any) -> None:
    assert differences(one, other) == []
    assert digest_leaves(one, "a") == digest_leaves(other, "a")


@pytest.mark.parametrize(
    ("one", "other", "paths"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), ["state"]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ["state"]),
        (torch.zeros(2, 3), torch.zeros(3, 2), ["state"]),
        (0.0, -0.0, ["state"]),
        (1, True, ["state"]),
        (1, 1.0, ["state"]),
        ((1,), [1], ["state"]),
        ([1], [1, 2], ["state"]),
        ({"a": 1, "b": [1, 2]}, {"b": [1, 3], "c": 1}, ["state.a", "state.c", "state.b.1"]),
        (np.arange(3), np.arange(3, dtype=np.int32), ["state"]),
    ],
)
def test_differing_paths_are_listed(one: Any, other: Any, paths: list[str]) -> None:
    assert differences(one, other) == paths


def test_digests_name_every_leaf() -> None:
    found = digest_leaves({"a": [1, torch.zeros(2)], "b": {}, "c": NAN}, "state")
    assert list(found) == ["state.a.0", "state.a.1", "state.b", "state.c"]
    assert found["state.a.0"] != found["state.b"]
