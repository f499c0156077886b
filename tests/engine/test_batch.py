"""Nested inputs keep their form when their tensors are changed."""

from typing import Any, NamedTuple

import pytest
import torch

from phasetrain.engine.batch import Batch, StepOutput, entry, mapped


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


def test_mapped_keeps_the_form() -> None:
    value = {"a": [torch.ones(1), (torch.ones(2), "x")], "b": Pair(torch.ones(3), "n"), "c": None}
    found = mapped(value, lambda tensor: tensor * 2)
    assert found["a"][0].tolist() == [2.0]
    assert found["a"][1][0].tolist() == [2.0, 2.0]
    assert (found["a"][1][1], found["c"]) == ("x", None)
    assert isinstance(found["b"], Pair)
    assert found["b"].image.tolist() == [2.0, 2.0, 2.0]
    assert value["a"][0].tolist() == [1.0]


def test_a_batch_moves_and_its_ids_stay() -> None:
    batch = Batch(
        {"x": torch.ones(2)}, torch.zeros(2), torch.tensor([5, 6]), 2, torch.tensor([True, False])
    )
    moved = batch.to(torch.device("meta"))
    assert [moved.input["x"].device.type, moved.target.device.type, moved.mask.device.type] == [
        "meta"
    ] * 3
    assert (moved.ids.tolist(), moved.size) == ([5, 6], 2)


def test_a_batch_without_targets_and_mask_moves_too() -> None:
    moved = Batch(torch.ones(2), None, torch.tensor([5, 6]), 2).to(torch.device("meta"))
    assert (moved.target, moved.mask) == (None, None)


def test_what_could_not_be_read_travels_with_the_batch() -> None:
    batch = Batch(torch.ones(2), None, torch.tensor([5, 6]), 2, bad=((4, "OSError: x"),))
    assert batch.to(torch.device("meta")).bad == ((4, "OSError: x"),)
    assert Batch(torch.ones(2), None, torch.tensor([5, 6]), 2).bad == ()


def test_an_output_has_logs_of_its_own() -> None:
    one, other = StepOutput(torch.zeros(()), 1.0, 1), StepOutput(torch.zeros(()), 1.0, 1)
    one.logs["x"] = 1
    assert other.logs == {}


def test_a_weight_goes_along() -> None:
    batch = Batch(torch.ones(2, 3), None, torch.arange(2), 2, weight=5)
    assert batch.to(torch.device("cpu")).weight == 5
    assert batch.as_stand_in().weight is None


@pytest.mark.parametrize(
    ("value", "key", "found"),
    [({"a": 1}, "a", 1), ([3, 4], 1, 4), ((3, 4), 0, 3), ({"a": 1}, None, {"a": 1})],
)
def test_an_entry(value: Any, key: Any, found: Any) -> None:
    assert entry(value, key, "METERS.x.output") == found


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        (
            {"digit": 1},
            "dgit",
            "METERS.x.output = 'dgit': no such entry; there are digit; did you mean 'digit'?",
        ),
        ([1, 2], 2, "METERS.x.output = 2: no such entry; there are 2, numbered from 0"),
        ([1, 2], "a", "METERS.x.output = 'a': no such entry; there are 2, numbered from 0"),
        (
            1.5,
            "a",
            "METERS.x.output = 'a': no such entry; it is one float, without entries; leave METERS.x.output out",
        ),
    ],
)
def test_no_such_entry(value: Any, key: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        entry(value, key, "METERS.x.output")
    assert str(caught.value) == message
