"""Facts about datasets that do not report any."""

from types import SimpleNamespace
from typing import Any

import pytest

from phasetrain.tasks.build.data_builder import read_class_attributes


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
