"""Samples are collated by torch's rules, and errors describe shapes that differ."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from phasetrain.data.loading.collate import (
    COLLATES,
    Collate,
    describe_form,
    find_common_form,
    make_pad,
)
from phasetrain.errors import ConfigError

stack = COLLATES["stack"]()


def test_tensors_and_numbers_are_stacked() -> None:
    inputs, targets = stack([(torch.tensor([1.0, 2.0]), 3), (torch.tensor([4.0, 5.0]), 6)])
    assert inputs.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert (targets.tolist(), targets.dtype) == ([3, 6], torch.int64)


def test_nested_inputs_are_stacked() -> None:
    inputs, _ = stack([({"a": torch.ones(2), "b": [1, 2.0]}, 0)] * 3)
    assert inputs["a"].shape == (3, 2)
    assert [column.tolist() for column in inputs["b"]] == [[1, 1, 1], [2.0, 2.0, 2.0]]


def test_sample_of_another_shape_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"sample 2 .*\(3,\).*\(2,\).*DATA\.TEST\.collate"):
        stack([(torch.zeros(2), 0), (torch.zeros(2), 0), (torch.zeros(3), 0)])


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
def test_form_of_a_value_is_described(value: Any, words: str) -> None:
    assert describe_form(value) == words


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
def test_most_frequent_form_wins_and_the_earliest_of_equals(
    values: list[Any], common: str | None
) -> None:
    assert find_common_form(values) == common


class TestWithoutTargets:
    @pytest.mark.parametrize("name", ["stack", "pad"])
    def test_batch_has_no_target_if_no_sample_has_one(self, name: str) -> None:
        inputs, targets = COLLATES[name](**({"mask": None} if name == "pad" else {}))(
            [(torch.ones(2), None)] * 3
        )
        assert (inputs.shape, targets) == ((3, 2), None)

    def test_mix_of_samples_with_and_without_targets_is_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"^1 of 2 .*None"):
            stack([(1, 2), (1, None)])


def test_type_that_cannot_be_stacked_is_rejected() -> None:
    class Picture:
        pass

    with pytest.raises(ValueError, match=r"^inputs .*Picture"):
        stack([(Picture(), 0), (Picture(), 1)])
    picture = Picture()
    assert COLLATES["list"]()([(picture, 0)]) == ([picture], [0])


def test_list_keeps_samples_unstacked() -> None:
    one, other = torch.ones(1, 2, 3), torch.ones(1, 5, 4)
    inputs, targets = COLLATES["list"]()(
        [(one, {"boxes": torch.ones(2, 4)}), (other, {"boxes": torch.ones(0, 4)})]
    )
    assert inputs[0] is one
    assert inputs[1] is other
    assert [target["boxes"].shape for target in targets] == [(2, 4), (0, 4)]


class TestPad:
    SHORT, LONG = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])

    def test_inputs_are_padded_to_the_longest_with_a_mask(self) -> None:
        inputs, targets = COLLATES["pad"]()([(self.SHORT, 0), (self.LONG, 1)])
        assert inputs["input"].tolist() == [[1, 2, 0], [3, 4, 5]]
        assert inputs["mask"].tolist() == [[True, True, False], [True, True, True]]
        assert targets.tolist() == [0, 1]

    def test_padding_values_can_be_set_and_the_mask_left_out(self) -> None:
        made = COLLATES["pad"](value=-1.0, target_value=-7, mask=None)
        inputs, targets = made([(self.SHORT, torch.tensor([8])), (self.LONG, torch.tensor([8, 9]))])
        assert inputs.tolist() == [[1, 2, -1], [3, 4, 5]]
        assert targets.tolist() == [[8, -7], [8, 9]]

    def test_cross_entropy_ignores_padded_targets(self) -> None:
        _, targets = COLLATES["pad"]()(
            [(self.SHORT, torch.tensor([0])), (self.LONG, torch.tensor([0, 1]))]
        )
        logits = torch.tensor([[[2.0, 1.0], [9.0, -9.0]], [[2.0, 1.0], [1.0, 2.0]]])
        loss = torch.nn.functional.cross_entropy(logits.view(4, 2), targets.view(4))
        assert loss.item() == pytest.approx(0.313262, abs=1e-6)

    def test_mask_is_added_to_a_mapping_of_inputs(self) -> None:
        samples = [
            ({"ids": torch.tensor([1]), "n": 1}, 0),
            ({"ids": torch.tensor([2, 3]), "n": 2}, 0),
        ]
        inputs, _ = COLLATES["pad"](mask="attention_mask")(samples)
        assert inputs.keys() == {"ids", "attention_mask", "n"}
        assert inputs["ids"].tolist() == [[1, 0], [2, 3]]
        assert inputs["attention_mask"].tolist() == [[True, False], [True, True]]
        assert inputs["n"].tolist() == [1, 2]

    @pytest.mark.feature("model.transformers_inputs")
    def test_each_input_of_a_mapping_can_have_its_padding_value(self) -> None:
        one = {"input_ids": torch.tensor([5]), "attention_mask": torch.tensor([1])}
        other = {"input_ids": torch.tensor([6, 7]), "attention_mask": torch.tensor([1, 1])}
        made = COLLATES["pad"](value={"input_ids": 1}, mask="attention_mask")
        inputs, _ = made([(one, 0), (other, 0)])
        assert inputs["input_ids"].tolist() == [[5, 1], [6, 7]]
        assert inputs["attention_mask"].tolist() == [[1, 0], [1, 1]]
        with pytest.raises(ValueError, match=r"'input_id'; did you mean 'input_ids'"):
            COLLATES["pad"](value={"input_id": 1})([(one, 0)])
        with pytest.raises(ValueError, match=r"^value = "):
            COLLATES["pad"](value={"input_ids": 1})([(self.SHORT, 0)])

    def test_only_the_first_dimension_is_padded(self) -> None:
        inputs, _ = COLLATES["pad"]()([(torch.ones(2, 3), 0), (torch.ones(4, 3), 0)])
        assert inputs["input"].shape == (2, 4, 3)
        with pytest.raises(ValueError, match=r"^inputs: sample 1 .*\(4, 2\)"):
            COLLATES["pad"]()([(torch.ones(2, 3), 0), (torch.ones(4, 2), 0)])

    def test_inputs_without_a_length_are_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"^inputs .*int\b"):
            COLLATES["pad"]()([(1, 0)])

    def test_it_travels_to_spawned_workers(self) -> None:
        made = COLLATES["pad"](mask=None)
        assert pickle.loads(pickle.dumps(made)) == made


def make_detections() -> list[Any]:
    """Return two samples with one and two boxes."""
    return [
        (
            torch.zeros(3, 4, 4),
            {"boxes": torch.ones(1, 4), "labels": torch.tensor([5]), "name": ["a"]},
        ),
        (
            torch.ones(3, 4, 4),
            {"boxes": torch.ones(2, 4), "labels": torch.tensor([6, 7]), "name": ["b", "c"]},
        ),
    ]


@pytest.mark.feature(
    "data.collate",
    "targets of variable length: padded with a mask, or lists, per field",
    "`DATA.*.collate: {name: pad, fields: [...], lists: [...]}`",
)
def test_named_fields_are_padded_and_others_become_lists() -> None:
    collate = COLLATES.build(
        "pad",
        {"fields": ["boxes", "labels"], "lists": ["name"], "target_value": {"boxes": 0}},
    )
    inputs, targets = collate(make_detections())
    assert inputs.shape == (2, 3, 4, 4)
    assert targets["boxes"][0].tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]
    assert targets["labels"].tolist() == [[5, -100], [6, 7]]
    assert targets["mask"].tolist() == [[True, False], [True, True]]
    assert targets["name"] == [["a"], ["b", "c"]]


@pytest.mark.feature("data.collate")
def test_field_of_unequal_length_is_rejected_with_the_key_that_helps() -> None:
    with pytest.raises(ValueError, match=r"'boxes': sample 1 .*fields: \[boxes\]"):
        stack(make_detections())
    collate = COLLATES.build("pad", {"fields": ["labels"]})
    with pytest.raises(ValueError, match=r"'boxes': sample 1"):
        collate(make_detections())


@pytest.mark.parametrize("make", [lambda: stack, lambda: make_pad(fields=["image"])])
def test_target_without_a_name_of_unequal_length_is_rejected(make: Callable[[], Collate]) -> None:
    samples = [({"image": torch.ones(2)}, torch.ones(length)) for length in (2, 3)]
    with pytest.raises(ValueError, match=r"^targets .*\(3,\)\); set collate=pad without `fields`"):
        make()(samples)
    target = make_pad(mask=None)(samples)[1]
    assert target.tolist() == [[1, 1, -100], [1, 1, 1]]


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"fields": ["box"]}, "no field 'box'.*boxes"),
        ({"fields": ["boxes"], "lists": ["labels", "name"], "mask": "labels"}, "mask = 'labels'"),
        ({"fields": ["boxes"], "lists": ["labels", "boxes"]}, "boxes is in both"),
    ],
)
def test_wrong_names_of_fields_are_rejected(params: Any, match: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=match):
        COLLATES.build("pad", params)(make_detections())
