import pytest
import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.class_scores import (
    check_classes,
    make_class_labels,
    read_scores,
)


def read(output, target):
    return read_scores("f1", StepOutput(torch.tensor(0.0), 1.0, len(output), output, target))


def test_integer_targets_are_single_labels():
    found = read(torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, 1], dtype=torch.int32))
    assert (found.is_single_label, found.target.dtype, found.scores.requires_grad) == (
        True,
        torch.int64,
        False,
    )


@pytest.mark.parametrize(
    "target", [torch.tensor([[1, 0], [0, 1]]), torch.tensor([[0.7, 0.5], [0.0, 0.9]])]
)
def test_two_dimensional_targets_are_labels(target):
    found = read(torch.zeros(2, 2), target)
    assert (found.is_single_label, found.target.tolist()) == (False, [[True, False], [False, True]])


@pytest.mark.parametrize("output", [torch.tensor([-1.0, 2.0]), torch.tensor([[-1.0], [2.0]])])
@pytest.mark.parametrize(
    "target", [torch.tensor([0, 1]), torch.tensor([0.0, 1.0]), torch.tensor([[0], [1]])]
)
def test_binary_task_becomes_two_classes(output, target):
    found = read(output, target)
    assert (found.scores.tolist(), found.target.tolist()) == ([[-1.0], [2.0]], [[False], [True]])
    two = found.as_two_classes(0.0)
    assert (two.is_single_label, two.scores.argmax(1).tolist(), two.target.tolist()) == (
        True,
        [0, 1],
        [0, 1],
    )
    assert found.as_two_classes(5.0).scores.argmax(1).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("output", "target", "message"),
    [
        (
            torch.zeros(4, 3),
            torch.zeros(4),
            r"f1 .*torch\.float32",
        ),
        (torch.zeros(4, 3), torch.zeros(3).long(), r"outputs \(4, 3\) .*targets \(3,\)"),
        (torch.zeros(4, 3), torch.zeros(4, 2), r"outputs \(4, 3\) .*targets \(4, 2\)"),
        (torch.zeros(4, 1), torch.zeros(4, 3), r"outputs \(4, 1\) .*targets \(4, 3\)"),
        (torch.zeros(4, 3, 2), torch.zeros(4, 3, 2), r"outputs \(4, 3, 2\)"),
        ({"a": 1}, None, "dict .*NoneType"),
    ],
)
def test_misfitting_inputs_are_rejected(output, target, message):
    with pytest.raises(ValueError, match=message):
        read(output, target)


@pytest.mark.parametrize(
    ("target", "ignore_index", "counted"),
    [
        (torch.tensor([0, 1, -100]), None, [True, True, True]),
        (torch.tensor([0, 1, -100]), -100, [True, True, False]),
        (torch.tensor([0, 1, 0]), 0, [False, True, False]),
        (torch.tensor([[0, -100], [1, 0]]), -100, [[True, False], [True, True]]),
        # Class 0 of a loss of classes says nothing about labels.
        (torch.tensor([[0, 1], [1, 0]]), 0, [[True, True], [True, True]]),
    ],
)
def test_targets_equal_to_ignore_index_do_not_count(target, ignore_index, counted):
    out = StepOutput(torch.tensor(0.0), 1.0, len(target), torch.zeros(len(target), 2), target)
    assert read_scores("f1", out, ignore_index).counted_mask().tolist() == counted


def test_class_names_are_unique():
    assert make_class_labels(2, ("cat", "dog")) == ("cat", "dog")
    assert make_class_labels(2, None) == ("0", "1")
    assert make_class_labels(3, ("cat", "dog")) == ("0", "1", "2")
    assert make_class_labels(3, ("crane", "dog", "crane")) == ("crane_0", "dog", "crane_2")


def test_different_number_of_classes_is_rejected():
    with pytest.raises(ValueError, match=r"f1: classes = 10, .*\b3\b"):
        check_classes("f1", 3, 10)
