"""Samples become a batch by torch's rules, and odd shapes are said in words."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from phasetrain.data.collate import COLLATES, common_form, form

stack = COLLATES["stack"]()


def test_tensors_and_numbers() -> None:
    inputs, targets = stack([(torch.tensor([1.0, 2.0]), 3), (torch.tensor([4.0, 5.0]), 6)])
    assert inputs.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert (targets.tolist(), targets.dtype) == ([3, 6], torch.int64)


def test_nested_inputs() -> None:
    inputs, _ = stack([({"a": torch.ones(2), "b": [1, 2.0]}, 0)] * 3)
    assert inputs["a"].shape == (3, 2)
    assert [column.tolist() for column in inputs["b"]] == [[1, 1, 1], [2.0, 2.0, 2.0]]


def test_odd_shapes() -> None:
    with pytest.raises(ValueError) as caught:
        stack([(torch.zeros(2), 0), (torch.zeros(2), 0), (torch.zeros(3), 0)])
    assert str(caught.value) == (
        "sample 2 of the batch has shape (3,), the first has (2,); bring all samples to one shape (a transform such as "
        "resize), or set another collate"
    )


def test_it_travels_to_spawned_workers() -> None:
    assert pickle.loads(pickle.dumps(stack))([(1, 2)])[1].tolist() == [2]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(1, 8, 8), "float32 (1, 8, 8)"),
        (np.zeros(3), "array of float64 (3,)"),
        ((torch.tensor(1), 3), "(int64 (), int)"),
        ({"b": [1.0, "x"], "a": None}, "{a: NoneType, b: (float, str)}"),
    ],
)
def test_a_form_in_words(value: Any, words: str) -> None:
    assert form(value) == words


@pytest.mark.parametrize(
    ("values", "common"),
    [
        ([1, 2.0, 3.0], "float"),
        ([1, 2.0], "int"),
        ([2.0, 1, 3, 4.0], "float"),
        ([torch.zeros(2), torch.zeros(3), torch.zeros(3)], "float32 (3,)"),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2)], "float32 (2,)"),
        ([], None),
    ],
)
def test_the_most_frequent_form_wins_and_of_equals_the_earliest(values: list[Any], common: str | None) -> None:
    assert common_form(values) == common
