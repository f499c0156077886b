"""A mapping says what the words that are made of it say."""

from pathlib import Path
from typing import Any

import pytest
from raising import raises

from phasetrain.config.compose.composed import compose
from phasetrain.config.compose.override_text import (
    format_overrides,
    list_repeated,
    quote_text,
)
from phasetrain.errors import ConfigError


def test_sections_paths_and_choices_of_files() -> None:
    config = {
        "experiment": "digits",
        "MODEL": "resnet20",
        "OPTIMIZER": {"lr": 0.5, "others": []},
        "PHASES.epochs": 2,
    }
    assert format_overrides(config) == [
        "experiment=digits", "MODEL=resnet20", "OPTIMIZER.lr=0.5", "OPTIMIZER.others=[]", "PHASES.epochs=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 1e-5, float("inf"), "", "it's", "a\\", "\\'", "1e-3", "null", "a,b", "[x]", "{y}", "a: b",
     "é\n", "$x", [1, "a", None], {"a": {"b": ["c"]}}, [{"match": ["*.bias"], "lr": 0.0}]],
)  # fmt: skip
def test_every_value_comes_back(value: Any) -> None:
    composed = compose(format_overrides({"LOSS": {"anything": value}}))
    assert composed.problems == ()
    found = composed.config["LOSS"]["anything"]
    assert (found, type(found)) == (value, type(value))


def test_labels_that_are_no_words() -> None:
    composed = compose(
        format_overrides({"METERS": {"top 1:a, b": {"name": "accuracy"}, "loss": None}})
    )
    assert composed.problems == ()
    assert composed.config["METERS"] == {"accuracy": {}, "top 1:a, b": {"name": "accuracy"}}


def test_a_path() -> None:
    assert format_overrides({"RUN.dir": Path("a b/c")}) == ["RUN.dir='a b/c'"]


def test_what_no_config_can_hold() -> None:
    with raises(ConfigError, key="MODEL.widths[1]"):
        format_overrides({"MODEL": {"widths": [1, object()]}})


def test_quotes_and_backslashes() -> None:
    assert quote_text("a'b") == r"'a\'b'"
    assert quote_text("a\\b\\") == "'a\\b\\\\'"


def test_repeated_overrides_are_named_with_their_values() -> None:
    words = [
        "my.yaml",
        "experiment=digits",
        "OPTIMIZER.lr=0.1",
        "+OPTIMIZER.lr=0.2",
        "RUN.seed=1",
        "RUN.seed=1",
        "LOSS={gamma: 1}",
        "LOSS={name: focal}",
        "MODEL.width=1",
        "~MODEL.width",
    ]
    assert list_repeated(words) == [
        "experiment is given 2 times (my.yaml, digits); the last one counts",
        "OPTIMIZER.lr is given 2 times (0.1, 0.2); the last one counts",
    ]
