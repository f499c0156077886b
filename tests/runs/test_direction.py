"""Which values of a metric are better."""

import json
import math

import pytest

from phasetrain.runs.direction import (
    Direction,
    Objective,
    choose_split,
    guess_direction,
    parse_directions,
    resolve_objective,
)


def test_larger_scores_are_better_in_both_directions() -> None:
    assert (Direction.LARGER.score(2.0), Direction.SMALLER.score(2.0)) == (2.0, -2.0)
    assert Direction.SMALLER.is_better(1.0, 2.0)
    assert not Direction.LARGER.is_better(1.0, 2.0)
    assert not Direction.LARGER.is_better(2.0, 2.0)
    assert not Direction.LARGER.is_better(math.nan, 2.0)


@pytest.mark.parametrize("text", ["test/accuracy", "-test/loss"])
def test_objective_has_the_form_of_configs(text: str) -> None:
    assert str(Objective.parse(text)) == text


def test_objective_has_split_and_name() -> None:
    objective = Objective.parse("-dev/errors_mse")
    assert (objective.split, objective.name) == ("dev", "errors_mse")
    assert objective.direction is Direction.SMALLER


def test_directions_of_unknown_form_are_skipped() -> None:
    content = json.loads('{"a": "larger", "b": "smaller", "c": "up", "d": [1], "e": null}')
    assert parse_directions(content) == {"a": "larger", "b": "smaller"}
    assert parse_directions([1]) == {}


def test_sign_decides_before_the_record() -> None:
    recorded = {"test/wer": Direction.SMALLER, "test/x": Direction.LARGER}
    assert resolve_objective("test/wer", recorded).direction is Direction.SMALLER
    assert resolve_objective("-test/x", recorded).direction is Direction.SMALLER
    assert resolve_objective("test/loss", {}).direction is Direction.LARGER


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("test/accuracy", "larger"), ("test/loss", "smaller"), ("dev/clean_wer", "smaller"),
     ("train/loss_kl", "smaller"), ("test/lossless_share", None), ("test/f1_absent", None),
     ("", None)],
)  # fmt: skip
def test_guess_reads_whole_words(metric: str, direction: str | None) -> None:
    assert guess_direction(metric) == direction


@pytest.mark.parametrize(
    ("tests", "chosen"),
    [(["test", "valid"], "valid"), (["TEST", "DEV"], "DEV"), (["a", "b"], "a"), ([], "")],
)
def test_validation_split_chooses_before_any_test(tests: list[str], chosen: str) -> None:
    assert choose_split(tests) == chosen
