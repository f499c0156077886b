from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import torch

from phasetrain.config.annotations import described, fits


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
        (str, "a text"),
        (bool, "true or false"),
        (Literal[20, "a"], "20 or 'a'"),
        (list[float], "a list of float"),
        (list, "a list"),
        (tuple[float, float], "a list of 2: float, float"),
        (tuple[int, ...], "a list of int"),
        (dict[str, int], "a mapping to int"),
        (Mapping, "a mapping"),
        (torch.Tensor | None, "numbers or null"),
        (Path, "a path"),
    ],
)
def test_described(annotation: Any, words: str) -> None:
    assert described(annotation) == words
