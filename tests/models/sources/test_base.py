"""MODEL.weights is parsed into sources, and mistakes are reported with their key."""

from typing import Any

import pytest
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.models.sources import WeightSource, parse_sources


def test_null_path_mapping_and_list_are_parsed() -> None:
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
    ("value", "key", "code"),
    [
        (3, "MODEL.weights", "config.wrong_type"),
        ([], "MODEL.weights", "config.wrong_type"),
        (["a", 3], "MODEL.weights[1]", "config.wrong_type"),
        ({"prefix_add": "a"}, "MODEL.weights.path", "config.missing_key"),
        ({"path": "a", "prefix_remov": "x"}, "MODEL.weights.prefix_remov", "config.unknown_key"),
        ({"path": "a", "format": "safetensor"}, "MODEL.weights.format", "config.unknown_part"),
        ({"path": "a", "which": "mean"}, "MODEL.weights.which", "config.wrong_type"),
        ({"path": "a", "strict": 1}, "MODEL.weights.strict", "config.wrong_type"),
        ({"path": "a", "include": "x"}, "MODEL.weights.include", "config.wrong_type"),
        ({"path": "a", "rename": [["a"]]}, "MODEL.weights.rename", "config.wrong_type"),
        ([{"path": "a", "rename": [["(", ""]]}], "MODEL.weights[0].rename", "config.wrong_type"),
    ],
)
def test_mistakes_are_reported_with_their_key(value: Any, key: str, code: str) -> None:
    with raises(ConfigError, code=code, key=key):
        parse_sources(value)


@pytest.mark.addon("remote")
def test_unknown_path_prefix_is_rejected() -> None:
    with raises(ConfigError, key="MODEL.weights.path", given="'s4://a'"):
        WeightSource("s4://a").get_storage()
