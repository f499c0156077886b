"""Input and target by name or place, and targets that are made."""

from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.data.loading.fields import FieldSelection
from phasetrain.errors import ConfigError

SAMPLE = {"image": 1.5, "text": "a", "label": 3, "boxes": [7]}


@pytest.mark.parametrize(
    ("selection", "sample", "pair"),
    [
        (FieldSelection(), (1, 2), (1, 2)),
        (FieldSelection(), [1, 2], (1, 2)),
        (FieldSelection("image", "label"), SAMPLE, (1.5, 3)),
        (
            FieldSelection(["image", "text"], ["label"]),
            SAMPLE,
            ({"image": 1.5, "text": "a"}, {"label": 3}),
        ),
        (FieldSelection("image", []), SAMPLE, (1.5, None)),
        (FieldSelection(1, 2), (5, 6, 7), (6, 7)),
        (FieldSelection([0, 2], 1), (5, 6, 7), ((5, 7), 6)),
        (FieldSelection(targets=[]), (5, 6), (5, None)),
        (FieldSelection(targets=[]), "alone", ("alone", None)),
        (FieldSelection(label_type="sample_index"), (5, 6), (5, 42)),
        (FieldSelection(label_type="sample_index"), "alone", ("alone", 42)),
        (FieldSelection("image", label_type="zero"), SAMPLE, (1.5, 0)),
    ],
)
def test_pairs(selection: FieldSelection, sample: Any, pair: Any) -> None:
    assert selection.split_sample(sample, 42) == pair


@pytest.mark.parametrize(
    ("selection", "kind", "message", "sample"),
    [
        (
            FieldSelection("imge", "label", where="DATA.TRAIN"),
            ValueError,
            "DATA.TRAIN.inputs = 'imge': the sample has no such key; did you mean 'image'? it has image, "
            "text, label, boxes",
            SAMPLE,
        ),
        (
            FieldSelection("image", ["label", "mask"], where="DATA.VAL"),
            ValueError,
            "DATA.VAL.targets = 'mask':",
            SAMPLE,
        ),
        (
            FieldSelection(where="DATA.TRAIN"),
            TypeError,
            "the dataset returns {a: int}, expected a pair (input, target)",
            {"a": 1},
        ),
        (
            FieldSelection(where="DATA.TRAIN"),
            TypeError,
            "the dataset returns (int, int, int), expected a pair (input, target)",
            (1, 2, 3),
        ),
        (
            FieldSelection(),
            TypeError,
            "the dataset returns NoneType, expected a pair (input, target)",
            None,
        ),
        (
            FieldSelection(3, 0),
            ValueError,
            "DATA.inputs = 3:",
            (1, 2, 3),
        ),
        (
            FieldSelection("x"),
            ValueError,
            "DATA.inputs = 'x':",
            (1, 2),
        ),
        (
            FieldSelection("x"),
            TypeError,
            "DATA.inputs = 'x':",
            5,
        ),
        (
            FieldSelection(label_type="zero"),
            TypeError,
            "the dataset returns {a: int}, expected a pair (input, target)",
            {"a": 1},
        ),
    ],
)
def test_what_a_sample_lacks(
    selection: FieldSelection, kind: type[Exception], message: str, sample: Any
) -> None:
    with pytest.raises(kind) as caught:
        selection.split_sample(sample, 0)
    assert str(caught.value).startswith(message)


def test_a_target_is_made_or_taken() -> None:
    with raises(ConfigError, key="DATA.TRAIN.label_type"):
        FieldSelection(targets="label", label_type="zero", where="DATA.TRAIN")


@pytest.mark.parametrize(
    ("selection", "whole", "targets"),
    [
        (FieldSelection(), True, [8, 9]),
        (FieldSelection(targets=[]), True, None),
        (FieldSelection(label_type="sample_index"), True, [4, 5]),
        (FieldSelection(label_type="zero"), True, [0, 0]),
        (FieldSelection(inputs=0), False, [8, 9]),
    ],
)
def test_whole_batches(selection: FieldSelection, whole: bool, targets: list[int] | None) -> None:
    assert selection.keeps_inputs == whole
    found = selection.select_targets(torch.tensor([8, 9]), torch.tensor([4, 5]))
    assert (None if found is None else found.tolist()) == targets
