import pytest
import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.classification.scored import check_classes, class_labels, scored


def read(output, target):
    return scored("f1", StepOutput(torch.tensor(0.0), 1.0, len(output), output, target))


def test_one_class_per_sample():
    found = read(torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, 1], dtype=torch.int32))
    assert (found.single, found.target.dtype, found.scores.requires_grad) == (
        True,
        torch.int64,
        False,
    )


@pytest.mark.parametrize(
    "target", [torch.tensor([[1, 0], [0, 1]]), torch.tensor([[0.7, 0.5], [0.0, 0.9]])]
)
def test_several_labels(target):
    found = read(torch.zeros(2, 2), target)
    assert (found.single, found.target.tolist()) == (False, [[True, False], [False, True]])


@pytest.mark.parametrize("output", [torch.tensor([-1.0, 2.0]), torch.tensor([[-1.0], [2.0]])])
@pytest.mark.parametrize(
    "target", [torch.tensor([0, 1]), torch.tensor([0.0, 1.0]), torch.tensor([[0], [1]])]
)
def test_a_binary_task_of_one_score(output, target):
    found = read(output, target)
    assert (found.scores.tolist(), found.target.tolist()) == ([[-1.0], [2.0]], [[False], [True]])
    two = found.classes(0.0)
    assert (two.single, two.scores.argmax(1).tolist(), two.target.tolist()) == (
        True,
        [0, 1],
        [0, 1],
    )
    assert found.classes(5.0).scores.argmax(1).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("output", "target", "message"),
    [
        (
            torch.zeros(4, 3),
            torch.zeros(4),
            r"f1 takes whole numbers as classes, not torch.float32",
        ),
        (torch.zeros(4, 3), torch.zeros(3).long(), r"not outputs \(4, 3\) and targets \(3,\)"),
        (torch.zeros(4, 3), torch.zeros(4, 2), r"not outputs \(4, 3\) and targets \(4, 2\)"),
        (torch.zeros(4, 1), torch.zeros(4, 3), r"not outputs \(4, 1\) and targets \(4, 3\)"),
        (torch.zeros(4, 3, 2), torch.zeros(4, 3, 2), r"not outputs \(4, 3, 2\)"),
        ({"a": 1}, None, "not dict and NoneType"),
    ],
)
def test_what_does_not_fit_is_refused(output, target, message):
    with pytest.raises(ValueError, match=message):
        read(output, target)


def test_names_of_classes():
    assert class_labels(2, ("cat", "dog")) == ("cat", "dog")
    assert class_labels(2, None) == ("0", "1")
    assert class_labels(3, ("cat", "dog")) == ("0", "1", "2")
    assert class_labels(3, ("crane", "dog", "crane")) == ("crane_0", "dog", "crane_2")


def test_another_number_of_classes_is_refused():
    with pytest.raises(
        ValueError, match=r"f1: classes = 10, and the outputs have 3 scores; set classes to 3"
    ):
        check_classes("f1", 3, 10)
