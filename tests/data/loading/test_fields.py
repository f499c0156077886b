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
        (FieldSelection(), (5,), (5, None)),
        (FieldSelection(targets=[]), (5,), (5, None)),
        (FieldSelection(targets=[]), [5], ([5], None)),  # a list is an input of several parts
        (FieldSelection(label_type="sample_index"), (5,), (5, 42)),
        (FieldSelection(label_type="sample_index"), (5, 6), (5, 42)),
        (FieldSelection(label_type="sample_index"), "alone", ("alone", 42)),
        (FieldSelection("image", label_type="zero"), SAMPLE, (1.5, 0)),
    ],
)
def test_sample_is_split_into_input_and_target(
    selection: FieldSelection, sample: Any, pair: Any
) -> None:
    assert selection.split_sample(sample, 42) == pair


@pytest.mark.feature(
    "85",
    "fields by name; errors name sample, file and archive",
    "`DATA.*.inputs`, `DATA.*.targets`",
)
@pytest.mark.parametrize(
    ("selection", "kind", "message", "sample"),
    [
        (
            FieldSelection("imge", "label", where="DATA.TRAIN"),
            ValueError,
            r"DATA.TRAIN.inputs = 'imge':.*'image'.* image, text, label, boxes$",
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
            r"{a: int}",
            {"a": 1},
        ),
        (
            FieldSelection(where="DATA.TRAIN"),
            TypeError,
            r"\(int, int, int\)",
            (1, 2, 3),
        ),
        (
            FieldSelection(),
            TypeError,
            r"expected a pair \(input, target\)$",
            None,
        ),
        (
            FieldSelection(where="DATA.VAL"),
            TypeError,
            r"DATA\.VAL\.targets=\[\]",
            torch.zeros(3),
        ),
        (
            FieldSelection(3, 0),
            ValueError,
            "DATA.TRAIN.inputs = 3:",
            (1, 2, 3),
        ),
        (
            FieldSelection("x"),
            ValueError,
            "DATA.TRAIN.inputs = 'x':",
            (1, 2),
        ),
        (
            FieldSelection("x"),
            TypeError,
            "DATA.TRAIN.inputs = 'x':",
            5,
        ),
        (
            FieldSelection(label_type="zero"),
            TypeError,
            r"{a: int}",
            {"a": 1},
        ),
    ],
)
def test_missing_field_is_rejected(
    selection: FieldSelection, kind: type[Exception], message: str, sample: Any
) -> None:
    with pytest.raises(kind, match=message):
        selection.split_sample(sample, 0)


@pytest.mark.feature("78")
def test_target_that_is_both_read_and_generated_is_rejected() -> None:
    with raises(ConfigError, code="config.conflict", key="DATA.TRAIN.label_type"):
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
def test_targets_are_selected_from_whole_batches(
    selection: FieldSelection, whole: bool, targets: list[int] | None
) -> None:
    assert selection.keeps_inputs == whole
    found = selection.select_targets(torch.tensor([8, 9]), torch.tensor([4, 5]))
    assert (None if found is None else found.tolist()) == targets
