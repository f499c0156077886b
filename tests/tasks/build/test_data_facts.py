"""Facts about datasets that do not report all of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from phasetrain.tasks.build.data_builder import _facts, read_class_attributes


@pytest.mark.parametrize(
    ("attributes", "facts"),
    [
        ({}, {}),
        ({"classes": 3}, {"classes": 3}),
        ({"classes": ["a", "b"]}, {"classes": 2, "class_names": ("a", "b")}),
        ({"class_names": ("a", "b")}, {"classes": 2, "class_names": ("a", "b")}),
        ({"classes": 3, "class_names": "abc"}, {"classes": 3}),
        ({"classes": True}, {}),
        ({"classes": []}, {}),
    ],
)
def test_attributes_of_a_dataset_are_facts(
    attributes: dict[str, Any], facts: dict[str, Any]
) -> None:
    assert read_class_attributes(SimpleNamespace(**attributes)) == facts


@pytest.mark.parametrize(
    ("reported", "facts"),
    [
        ({"scale": 2.0}, {"classes": 2, "class_names": ("a", "b"), "scale": 2.0}),
        ({"classes": 3}, {"classes": 3, "class_names": ("a", "b")}),
    ],
)
def test_reported_facts_take_precedence_over_attributes(
    reported: dict[str, Any], facts: dict[str, Any]
) -> None:
    dataset: Any = SimpleNamespace(class_names=["a", "b"], facts=lambda: reported)
    assert _facts(dataset, "DATA.TRAIN") == facts
