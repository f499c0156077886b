"""What MODEL.weights may say, and what it is told where it cannot be used."""

from typing import Any

import pytest
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.models.sources import WeightSource, parse_sources


def test_nothing_a_path_a_mapping_and_a_bank() -> None:
    assert parse_sources(None) == ()
    assert parse_sources("a.pt") == (WeightSource("a.pt"),)
    assert parse_sources({"path": "a.pt", "rename": {"^a": "b"}, "exclude": ["head.*"]}) == (
        WeightSource("a.pt", rename=(("^a", "b"),), exclude=("head.*",)),
    )
    assert parse_sources(["a.pt", {"path": "b.pt", "rename": [["x", "y"]], "strict": False}]) == (
        WeightSource("a.pt", where="MODEL.weights[0]"),
        WeightSource("b.pt", rename=(("x", "y"),), strict=False, where="MODEL.weights[1]"),
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "MODEL.weights = 3:"),
        ([], "MODEL.weights = []:"),
        (["a", 3], "MODEL.weights[1] = 3:"),
        (
            {"prefix_add": "a"},
            "MODEL.weights.path: a source of weights needs a path; set MODEL.weights.path=...",
        ),
        (
            {"path": "a", "prefix_remov": "x"},
            "MODEL.weights.prefix_remov: a source of weights has no such key; did ",
        ),
        (
            {"path": "a", "format": "safetensor"},
            "MODEL.weights.format = 'safetensor':",
        ),
        (
            {"path": "a", "which": "mean"},
            "MODEL.weights.which = 'mean':",
        ),
        ({"path": "a", "strict": 1}, "MODEL.weights.strict = 1:"),
        (
            {"path": "a", "include": "x"},
            "MODEL.weights.include = 'x':",
        ),
        (
            {"path": "a", "rename": [["a"]]},
            "MODEL.weights.rename = [['a']]:",
        ),
        (
            [{"path": "a", "rename": [["(", ""]]}],
            "MODEL.weights[0].rename: '(' is not a regular expression: missing ), u",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_key(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_sources(value)
    assert str(caught.value).startswith(message)


def test_a_prefix_that_no_path_handler_is_registered_for() -> None:
    with raises(ConfigError, key="MODEL.weights.path", given="'s4://a'"):
        WeightSource("s4://a").get_storage()
