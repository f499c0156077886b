from pathlib import Path
from typing import Any

import pytest

from phasetrain.config.compose.override_text import format_literal
from phasetrain.config.compose.overrides import read_overrides
from phasetrain.config.compose.sources import ConfigFiles
from phasetrain.config.schema import default_schema


def read(*overrides: str):
    return read_overrides(overrides, ConfigFiles(), default_schema())


def test_each_kind_goes_to_its_place() -> None:
    line = read(
        "experiment=digits",
        "LOSS=label_smoothing",
        "OPTIMIZER.lr=1e-2",
        "~RUN.seed",
        "DATA.TRAIN.split='a,b'",
    )
    assert line.experiment == "digits"
    assert line.groups == {"LOSS": ["label_smoothing"]}
    assert line.values == {"OPTIMIZER": {"lr": 0.01}, "DATA": {"TRAIN": {"split": "a,b"}}}
    assert line.removals == [("RUN.seed", None)]
    assert line.problems == []


def test_mapping_of_a_section_is_a_value() -> None:
    line = read("LOSS={name: focal}", "LOSS.gamma=2", "LOSS={alpha: {a: 1}}", "LOSS.alpha={b: 2}")
    assert line.groups == {}
    assert line.values == {"LOSS": {"name": "focal", "gamma": 2, "alpha": {"a": 1, "b": 2}}}


def test_last_of_equal_overrides_wins() -> None:
    assert read("OPTIMIZER.lr=1", "OPTIMIZER.lr=2").values == {"OPTIMIZER": {"lr": 2}}
    assert read("LOSS=cross_entropy", "LOSS=label_smoothing").groups == {
        "LOSS": ["label_smoothing"]
    }


def test_tilde_undoes_earlier_overrides() -> None:
    line = read("LOSS.gamma=3", "LOSS.alpha=1", "~LOSS.gamma", "MODEL=mlp", "~MODEL")
    assert line.values == {"LOSS": {"alpha": 1}}
    assert line.groups == {}
    assert [path for path, _ in line.removals] == ["LOSS.gamma", "MODEL"]


def test_numeric_keys_of_mappings_become_text() -> None:
    assert read("LOSS.weights={1: 0.5}").values == {"LOSS": {"weights": {"1": 0.5}}}


def test_words_that_the_shell_has_split_are_one_problem() -> None:
    line = read("OPTIMIZER={lr:", "0.1,", "momentum:", "0.9}", "RUN.seed=1", "LOSS={a: 1")
    first, second = line.problems
    assert (first.code, first.key) == ("config.override", "OPTIMIZER")
    assert "'OPTIMIZER={lr: 0.1, momentum: 0.9}'" in first.message
    assert second.key == "LOSS"
    assert line.values == {"RUN": {"seed": 1}}


def test_second_experiment_is_rejected() -> None:
    (problem,) = read("experiment=[digits,digits]").problems
    assert (problem.code, problem.key) == ("config.override", "experiment")


@pytest.mark.parametrize("other", ["experiment=null", "experiment=digits", "b.yaml"])
@pytest.mark.parametrize("is_last", [False, True])
def test_file_next_to_another_experiment_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, is_last: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml"):
        Path(name).write_text("RUN: {seed: 3}\n")
    words = ["a.yaml", "RUN.seed=1", other]
    (problem,) = read(*(words[::-1] if is_last else words)).problems
    assert (problem.code, problem.key) == ("config.conflict", "experiment")
    assert read("a.yaml", "RUN.seed=1", "a.yaml").problems == []
    assert read("experiment=digits", "experiment=null").problems == []


@pytest.mark.parametrize(
    "value",
    [
        {"name": "step", "every": [1, None, True, 1e-05, "5 epochs"]},
        "it's \\ a path\\",
        "\\'\\\\'",
        "",
        [[], {}, [{"a": {"b": -0.5}}]],
        "null",
        "${x} = [1, 2], {a: b}",
    ],
)
def test_a_value_as_a_word_is_read_as_it_was(value: Any) -> None:
    assert read(f"RUN.name={format_literal(value, 'RUN.name')}").values == {"RUN": {"name": value}}


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("OPTIMIZER.betas=(0.9,0.99)", "OPTIMIZER.betas=[0.9,0.99]"),
        ("DATA.TRAIN.transforms[0].pixels=2", "DATA.TRAIN.transforms=[...]"),
        ("OPTIMIZER.lr=0.1;", "remove the ';'"),
        ("RUN.name=a!b", "\"RUN.name='a!b'\""),
        ("OPTIMIZER={lr:0,1}", "as in {lr: 0.1}"),
        ("OPTIMIZER={lr=0.1}", "as in {lr: 0.1}"),
        ("OPTIMIZER={'lr':0.1}", "keys in braces have no quotes"),
        ("OPTIMIZER.lr==0.1", "OPTIMIZER.lr=0.1"),
        ("OPTIMIZER.lr =0.1", "OPTIMIZER.lr=0.1"),
        ("OPTIMIZER..lr=0.1", "a name is missing"),
        ("OPTIMIZER.betas=[0.9,0.99", "[ is not closed"),
        ("METERS.größe={}", "set this one in a file"),
        ("METERS={größe: {}}", "in files only"),
    ],
)
def test_value_that_cannot_be_read_gets_the_right_form(word: str, hint: str) -> None:
    (problem,) = read(word).problems
    assert problem.code == "config.override"
    assert hint in problem.message
