from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import torch

from phasetrain.config.sections.value_types import ValueType, describe_type, fits


class Other: ...


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [1, -1], [True, 1.0, "1", None]),
        (float, [1, 1.5], [True, "1e-3", None]),
        (bool, [True], [1, "true"]),
        (str, ["a"], [1, None]),
        (None, [None], [0]),
        (Optional[int], [1, None], ["a"]),  # noqa: UP045 - as older code writes it
        (float | str, [1, "a"], [None, [1]]),
        (Literal[20, 32, "a"], [20, "a"], [21, 20.0, True]),
        (Literal[1], [1], [True]),
        (list[int], [[], [1], (1,)], [[1.5], "a", 1]),
        (Sequence[str], [["a"], ()], ["a", [1]]),
        (tuple[float, float], [[0.9, 1], (0, 1)], [[0.9], [1, 2, 3], ["a", 1]]),
        (tuple[int, ...], [[], [1, 2, 3]], [["a"]]),
        (list, [[1, "a"]], ["a", {}]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "b"}, []]),
        (Mapping[str, Any], [{"a": []}], [1]),
        (Path, ["runs"], [1]),
        (torch.Tensor, [1, [1.0, 2], [[1], [2]]], ["a", ["a"]]),
        (torch.Tensor | None, [None, [1]], ["a"]),
        (Any, [1, "a", None], []),
        (Other, [1, "a", None], []),
    ],
)
def test_fits(annotation: Any, good: list, bad: list) -> None:
    assert [value for value in good if not fits(value, annotation)] == []
    assert [value for value in bad if fits(value, annotation)] == []


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (float | None, "float or null"),
        (str, "str"),
        (bool, "bool"),
        (Literal[20, "a"], "20 or 'a'"),
        (list[float], "list of float"),
        (list, "list"),
        (tuple[float, float], "list of 2: float, float"),
        (tuple[int, ...], "list of int"),
        (dict[str, int], "mapping to int"),
        (Mapping, "mapping"),
        (torch.Tensor | None, "numbers or null"),
        (Path, "path"),
    ],
)
def test_types_in_words(annotation: Any, words: str) -> None:
    assert describe_type(annotation) == words


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (ValueType(int, {"ge": 1}), "int >= 1", [1, 2], [0, True, 1.0, "1", None]),
        (
            ValueType(float | None, {"gt": 0}),
            "float > 0 or null",
            [0.5, 1, None],
            [0, False, "1e-3", float("nan"), float("inf")],
        ),
        (
            ValueType(float, {"ge": 0, "lt": 1}),
            "float >= 0 and < 1",
            [0, 0.999],
            [1, -0.1],
        ),
        (
            ValueType(bool | int | Literal["node"], {"ge": 2}),
            "bool or int >= 2 or 'node'",
            [True, 2, "node"],
            [1, "nodes", None],
        ),
        (ValueType(tuple[str, ...]), "list of str", [[], ["a"], ("a",)], ["a", [1], [None]]),
        (ValueType(Mapping[str, Any]), "mapping", [{}, {"a": 1}], [[], None]),
    ],
)
def test_bounds_hold_for_numbers_only(kind: ValueType, text: str, good: list, bad: list) -> None:
    assert kind.text == text
    assert [value for value in good if not kind.fits(value)] == []
    assert [value for value in bad if kind.fits(value)] == []
