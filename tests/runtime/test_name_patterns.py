import pytest
from raising import raises
from torch import nn

from phasetrain.errors import ConfigError
from phasetrain.runtime.name_patterns import filter_names, match_modules, match_names

NAMES = ("trunk.conv.weight", "trunk.conv.bias", "head.weight")


def describe(key: str, number: int, pattern: str) -> str:
    return f"{key}[{number}] = {pattern}: no such name"


def test_a_pattern_matches_whole_names_in_their_order() -> None:
    assert match_names("*.weight", NAMES, "") == ["trunk.conv.weight", "head.weight"]
    assert match_names("trunk.*", NAMES[::-1], "") == ["trunk.conv.bias", "trunk.conv.weight"]


def test_a_pattern_without_a_match_suggests_a_name() -> None:
    with raises(ConfigError, code="config.no_match", suggestion="head.weight"):
        match_names("head.wieght", NAMES, "X = head.wieght: no such name")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), list(NAMES)),
        (("head.*", "*.bias"), (), ["trunk.conv.bias", "head.weight"]),
        ((), ("*.bias",), ["trunk.conv.weight", "head.weight"]),
        (("trunk.*",), ("*.bias",), ["trunk.conv.weight"]),
        (("head.*",), ("*",), []),
    ],
)
def test_names_are_included_and_then_excluded(
    include: tuple[str, ...], exclude: tuple[str, ...], expected: list[str]
) -> None:
    assert filter_names(NAMES, include, exclude, describe) == expected


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_an_error_names_the_pattern(key: str) -> None:
    patterns = {"include": (), "exclude": (), key: ("*", "bias")}
    with pytest.raises(ConfigError, match=rf"{key}\[1\] = bias: no such name"):
        filter_names(NAMES, patterns["include"], patterns["exclude"], describe, code="x")


def test_modules_match_by_name_or_class_in_their_order() -> None:
    modules = dict(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).named_children())
    assert match_modules("Linear", modules, "") == ["0", "2"]
    assert match_modules("[01]", modules, "") == ["0", "1"]
    with raises(ConfigError, code="config.no_match", suggestion="Linear"):
        match_modules("Liner", modules, "X = Liner: it matches nothing")
