"""Samples become a batch by torch's rules, and odd shapes are said in words."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from phasetrain.data.loading.collate import COLLATES, describe_form, find_common_form

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
    assert str(caught.value).startswith("sample 2 of the batch has shape (3,), the first has (2,)")


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
def test_the_most_frequent_form_wins_and_of_equals_the_earliest(
    values: list[Any], common: str | None
) -> None:
    assert find_common_form(values) == common


class TestWithoutTargets:
    @pytest.mark.parametrize("name", ["stack", "pad"])
    def test_none_of_any_sample_is_none_of_the_batch(self, name: str) -> None:
        inputs, targets = COLLATES[name](**({"mask": None} if name == "pad" else {}))(
            [(torch.ones(2), None)] * 3
        )
        assert (inputs.shape, targets) == ((3, 2), None)

    def test_some_without_are_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"^1 of 2 samples have the target None, and the others have one$"
        ):
            stack([(1, 2), (1, None)])


def test_what_cannot_be_stacked_is_said_in_words() -> None:
    class Picture:
        pass

    with pytest.raises(ValueError) as caught:
        stack([(Picture(), 0), (Picture(), 1)])
    assert str(caught.value).startswith("inputs are Picture")
    assert COLLATES["list"]()([(caught, 0)]) == ([caught], [0])


def test_a_list_stacks_nothing() -> None:
    one, other = torch.ones(1, 2, 3), torch.ones(1, 5, 4)
    inputs, targets = COLLATES["list"]()(
        [(one, {"boxes": torch.ones(2, 4)}), (other, {"boxes": torch.ones(0, 4)})]
    )
    assert inputs[0] is one
    assert inputs[1] is other
    assert [target["boxes"].shape for target in targets] == [(2, 4), (0, 4)]


class TestPad:
    SHORT, LONG = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])

    def test_up_to_the_longest_with_a_mask(self) -> None:
        inputs, targets = COLLATES["pad"]()([(self.SHORT, 0), (self.LONG, 1)])
        assert inputs["input"].tolist() == [[1, 2, 0], [3, 4, 5]]
        assert inputs["mask"].tolist() == [[True, True, False], [True, True, True]]
        assert targets.tolist() == [0, 1]

    def test_without_a_mask_and_with_other_values(self) -> None:
        made = COLLATES["pad"](value=-1.0, target_value=-7, mask=None)
        inputs, targets = made([(self.SHORT, torch.tensor([8])), (self.LONG, torch.tensor([8, 9]))])
        assert inputs.tolist() == [[1, 2, -1], [3, 4, 5]]
        assert targets.tolist() == [[8, -7], [8, 9]]

    def test_targets_that_are_filled_up_are_left_out_by_cross_entropy(self) -> None:
        _, targets = COLLATES["pad"]()(
            [(self.SHORT, torch.tensor([0])), (self.LONG, torch.tensor([0, 1]))]
        )
        logits = torch.tensor([[[2.0, 1.0], [9.0, -9.0]], [[2.0, 1.0], [1.0, 2.0]]])
        loss = torch.nn.functional.cross_entropy(logits.view(4, 2), targets.view(4))
        assert loss.item() == pytest.approx(0.313262, abs=1e-6)

    def test_several_inputs(self) -> None:
        samples = [
            ({"ids": torch.tensor([1]), "n": 1}, 0),
            ({"ids": torch.tensor([2, 3]), "n": 2}, 0),
        ]
        inputs, _ = COLLATES["pad"](mask="attention_mask")(samples)
        assert inputs.keys() == {"ids", "attention_mask", "n"}
        assert inputs["ids"].tolist() == [[1, 0], [2, 3]]
        assert inputs["attention_mask"].tolist() == [[True, False], [True, True]]
        assert inputs["n"].tolist() == [1, 2]

    def test_frames_have_one_size(self) -> None:
        inputs, _ = COLLATES["pad"]()([(torch.ones(2, 3), 0), (torch.ones(4, 3), 0)])
        assert inputs["input"].shape == (2, 4, 3)
        with pytest.raises(
            ValueError, match=r"^inputs: sample 1 of the batch has shape \(4, 2\), the first has"
        ):
            COLLATES["pad"]()([(torch.ones(2, 3), 0), (torch.ones(4, 2), 0)])

    def test_what_has_no_length(self) -> None:
        with pytest.raises(
            ValueError, match=r"^inputs are int, expected tensors of at least one dimension$"
        ):
            COLLATES["pad"]()([(1, 0)])

    def test_it_travels_to_spawned_workers(self) -> None:
        made = COLLATES["pad"](mask=None)
        assert pickle.loads(pickle.dumps(made)) == made
