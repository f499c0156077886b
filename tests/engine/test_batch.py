"""Batches keep their structure when their tensors are moved."""

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from phasetrain.engine.batch import Batch, StepOutput, entry
from phasetrain.optim.update.nonfinite import list_nonfinite_ids


@pytest.mark.feature("10", "everything runs on CPU; nested batches are moved", "`MACHINE.device`")
def test_batch_moves_to_the_device_and_its_ids_stay() -> None:
    batch = Batch(
        {"x": torch.ones(2)}, torch.zeros(2), torch.tensor([5, 6]), 2, torch.tensor([True, False])
    )
    moved = batch.to(torch.device("meta"))
    assert [moved.input["x"].device.type, moved.target.device.type, moved.mask.device.type] == [
        "meta"
    ] * 3
    assert (moved.ids.tolist(), moved.size) == ([5, 6], 2)


@pytest.mark.feature("67")
def test_batch_of_a_device_is_complete_when_it_is_on_the_cpu() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3, 4])
    moved = Batch({"x": FakeCuda(x)}, FakeCuda(y), torch.tensor([5, 6]), 2).to(torch.device("cpu"))
    assert [moved.input["x"].tolist(), moved.target.tolist()] == [[1.0, 2.0], [3, 4]]


def test_batch_without_targets_and_mask_moves() -> None:
    moved = Batch(torch.ones(2), None, torch.tensor([5, 6]), 2).to(torch.device("meta"))
    assert (moved.target, moved.mask) == (None, None)


def test_bad_samples_are_kept_when_a_batch_moves() -> None:
    batch = Batch(torch.ones(2), None, torch.tensor([5, 6]), 2, bad=((4, "OSError: x"),))
    assert batch.to(torch.device("meta")).bad == ((4, "OSError: x"),)
    assert Batch(torch.ones(2), None, torch.tensor([5, 6]), 2).bad == ()


def test_each_output_has_its_own_logs() -> None:
    one, other = StepOutput(torch.zeros(()), 1.0, 1), StepOutput(torch.zeros(()), 1.0, 1)
    one.logs["x"] = 1
    assert other.logs == {}


def test_weight_is_kept_when_a_batch_moves() -> None:
    batch = Batch(torch.ones(2, 3), None, torch.arange(2), 2, weight=5)
    assert batch.to(torch.device("cpu")).weight == 5
    assert batch.as_padding().weight is None


@pytest.mark.parametrize(
    ("value", "key", "found"),
    [({"a": 1}, "a", 1), ([3, 4], 1, 4), ((3, 4), 0, 3), ({"a": 1}, None, {"a": 1})],
)
def test_entry_is_selected_by_key_or_index(value: Any, key: Any, found: Any) -> None:
    assert entry(value, key, "METERS.x.output") == found


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"digit": 1}, "dgit", r"METERS\.x\.output = 'dgit': .*'digit'"),
        ([1, 2], 2, r"METERS\.x\.output = 2: .*\b2\b"),
        ([1, 2], "a", r"METERS\.x\.output = 'a': .*\b2\b"),
        (1.5, "a", r"METERS\.x\.output = 'a': .*\bfloat\b"),
    ],
)
def test_missing_entry_is_rejected(value: Any, key: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry(value, key, "METERS.x.output")


def test_samples_that_are_not_finite_are_listed() -> None:
    images = torch.zeros(4, 2, 2)
    images[1, 0, 1] = torch.nan
    scores = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    per_batch = torch.full((2,), torch.nan)
    classes = torch.tensor([0, 1, 2, 3])
    value = {"images": images, "rest": [scores, classes, per_batch, None, "text"]}
    assert list_nonfinite_ids(value, torch.tensor([9, 8, 7, 6])) == [8, 6]
    assert list_nonfinite_ids(classes, torch.tensor([9, 8, 7, 6])) == []
    assert list_nonfinite_ids(images, torch.tensor([], dtype=torch.int64)) == []
