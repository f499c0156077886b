"""Samples become a batch by torch's rules, and odd shapes are said in words."""

import pickle

import pytest
import torch

from phasetrain.data.collate import COLLATES

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
