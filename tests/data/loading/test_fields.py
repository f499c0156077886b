"""Input and target by name or place, and targets that are made."""

from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.data.loading.fields import Selection
from phasetrain.errors import ConfigError

SAMPLE = {"image": 1.5, "text": "a", "label": 3, "boxes": [7]}


@pytest.mark.parametrize(
    ("selection", "sample", "pair"),
    [
        (Selection(), (1, 2), (1, 2)),
        (Selection(), [1, 2], (1, 2)),
        (Selection("image", "label"), SAMPLE, (1.5, 3)),
        (
            Selection(["image", "text"], ["label"]),
            SAMPLE,
            ({"image": 1.5, "text": "a"}, {"label": 3}),
        ),
        (Selection("image", []), SAMPLE, (1.5, None)),
        (Selection(1, 2), (5, 6, 7), (6, 7)),
        (Selection([0, 2], 1), (5, 6, 7), ((5, 7), 6)),
        (Selection(targets=[]), (5, 6), (5, None)),
        (Selection(targets=[]), "alone", ("alone", None)),
        (Selection(label_type="sample_index"), (5, 6), (5, 42)),
        (Selection(label_type="sample_index"), "alone", ("alone", 42)),
        (Selection("image", label_type="zero"), SAMPLE, (1.5, 0)),
    ],
)
def test_pairs(selection: Selection, sample: Any, pair: Any) -> None:
    assert selection.pair(sample, 42) == pair


@pytest.mark.parametrize(
    ("selection", "kind", "message", "sample"),
    [
        (
            Selection("imge", "label", where="DATA.TRAIN"),
            ValueError,
            "DATA.TRAIN.inputs = 'imge': the sample has no such name; did you mean 'image'? it has image, "
            "text, label, boxes",
            SAMPLE,
        ),
        (
            Selection("image", ["label", "mask"], where="DATA.VAL"),
            ValueError,
            "DATA.VAL.targets = 'mask': the sample has no such name; it has image, text, label, boxes",
            SAMPLE,
        ),
        (
            Selection(where="DATA.TRAIN"),
            TypeError,
            "the data set gives {a: int}, expected a pair (input, target); say by DATA.TRAIN.inputs and "
            "DATA.TRAIN.targets which of its values are which: 'a'",
            {"a": 1},
        ),
        (
            Selection(where="DATA.TRAIN"),
            TypeError,
            "the data set gives (int, int, int), expected a pair (input, target); say by DATA.TRAIN.inputs and "
            "DATA.TRAIN.targets which of its values are which: 0 to 2",
            (1, 2, 3),
        ),
        (
            Selection(),
            TypeError,
            "the data set gives NoneType, expected a pair (input, target)",
            None,
        ),
        (
            Selection(3, 0),
            ValueError,
            "DATA.inputs = 3: the sample is (int, int, int), expected a place from 0 to 2",
            (1, 2, 3),
        ),
        (
            Selection("x"),
            ValueError,
            "DATA.inputs = 'x': the sample is (int, int), expected a place from 0 to 1",
            (1, 2),
        ),
        (
            Selection("x"),
            TypeError,
            "DATA.inputs = 'x': the data set gives int, expected a mapping, list or tuple",
            5,
        ),
        (
            Selection(label_type="zero"),
            TypeError,
            "the data set gives {a: int}, expected a pair (input, target); say by DATA.inputs and DATA.targets which "
            "of its values are which: 'a'",
            {"a": 1},
        ),
    ],
)
def test_what_a_sample_lacks(
    selection: Selection, kind: type[Exception], message: str, sample: Any
) -> None:
    with pytest.raises(kind) as caught:
        selection.pair(sample, 0)
    assert str(caught.value) == message


def test_a_target_is_made_or_taken() -> None:
    with raises(ConfigError, key="DATA.TRAIN.label_type"):
        Selection(targets="label", label_type="zero", where="DATA.TRAIN")


@pytest.mark.parametrize(
    ("selection", "whole", "targets"),
    [
        (Selection(), True, [8, 9]),
        (Selection(targets=[]), True, None),
        (Selection(label_type="sample_index"), True, [4, 5]),
        (Selection(label_type="zero"), True, [0, 0]),
        (Selection(inputs=0), False, [8, 9]),
    ],
)
def test_whole_batches(selection: Selection, whole: bool, targets: list[int] | None) -> None:
    assert selection.keeps_inputs == whole
    found = selection.of_batch(torch.tensor([8, 9]), torch.tensor([4, 5]))
    assert (None if found is None else found.tolist()) == targets
