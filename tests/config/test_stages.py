from collections.abc import Callable
from pathlib import Path

import pytest

from phasetrain.app.setup import resolve_config
from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError, Problem

STAGED = "PHASES: {stages: [{epochs: 1}, {epochs: 2}]}\n"
TWO = "PHASES.stages=[{name: small, epochs: 2}, {updates: 5, DATA: {TRAIN: {batch_size: 32}}}]"


def stages(*words: str) -> tuple[AttrDict, ...]:
    return resolve_config(words).stages


def find_problems(*words: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve_config(words)
    return caught.value.problems


def test_run_without_stages_has_none() -> None:
    assert stages() == ()
    assert list(resolve_config([]).config.PHASES.stages) == []


def test_stage_has_its_changes_and_derived_values() -> None:
    first, second = stages(TWO, "OPTIMIZER.accumulate=4")
    assert (first.PHASES.epochs, first.PHASES.updates) == (2, None)
    assert (second.PHASES.epochs, second.PHASES.updates) == (None, 5)
    assert (first.DATA.TRAIN.batch_size, first.DATA.TRAIN.micro_batch_size) == (64, 16)
    assert (second.DATA.TRAIN.batch_size, second.DATA.TRAIN.micro_batch_size) == (32, 8)
    assert first.RUN == second.RUN == resolve_config([TWO, "OPTIMIZER.accumulate=4"]).config.RUN


def test_another_name_drops_parameters_of_the_old_part() -> None:
    (stage,) = stages(
        "LOSS.label_smoothing=0.1", "PHASES.stages=[{epochs: 1, LOSS: {name: MSELoss}}]"
    )
    assert stage.LOSS == {"name": "MSELoss"}


def test_parameters_of_the_same_part_are_merged() -> None:
    (stage,) = stages("PHASES.stages=[{epochs: 1, LOSS: {label_smoothing: 0.2}}]")
    assert stage.LOSS == {"name": "cross_entropy", "label_smoothing": 0.2}


def test_length_of_the_highest_layer_wins(user_dir: Callable[..., Path]) -> None:
    setup = resolve_config([TWO])  # the experiment asks for 12 epochs
    assert (setup.config.PHASES.epochs, len(setup.stages)) == (None, 2)
    assert any(line.startswith("PHASES.epochs: 12 -> null") for line in setup.derived)
    folder = user_dir(
        {"experiment/staged.yaml": f"# @package _global_\ndefaults: [digits, _self_]\n{STAGED}"}
    )
    longer = resolve_config(["experiment=staged", "PHASES.epochs=3"], config_dir=str(folder))
    assert (longer.config.PHASES.epochs, longer.stages) == (3, ())
    assert any(line.startswith("PHASES.stages: ") for line in longer.derived)


def test_keys_of_model_and_run_are_rejected_in_stages() -> None:
    stages = "[{epochs: 1, MODEL: {width: 8}}, {epochs: 1, RUN: {seed: 1}}]"
    assert [(one.code, one.key) for one in find_problems(f"PHASES.stages={stages}")] == [
        ("config.unchangeable", "PHASES.stages[0].MODEL.width"),
        ("config.unchangeable", "PHASES.stages[1].RUN.seed"),
    ]


def test_dotted_keys_in_stages_are_rejected() -> None:
    stages = "[{epochs: 1, MODEL.freeze: []}]"
    assert [(one.code, one.key) for one in find_problems(f"PHASES.stages={stages}")] == [
        ("config.unknown_key", "PHASES.stages[0].MODEL.freeze")
    ]


def test_misspelt_keys_and_names_in_stages_get_suggestions() -> None:
    (problem,) = find_problems("PHASES.stages=[{epoch: 1, updates: 3}]")
    assert problem.suggestion == "epochs"
    stage = "{epochs: 1, OPTIMIZER: {SCHEDULES: {lr: {name: cosin}}}}"
    (problem,) = find_problems(f"PHASES.stages=[{stage}]")
    assert problem.suggestion == "cosine"
    assert "PHASES.stages[0]" in problem.message


@pytest.mark.parametrize(
    ("stage", "code", "key", "suggestion"),
    [
        ("{name: a}", "config.conflict", "PHASES.stages[0]", ""),
        ("{epochs: 1, updates: 2}", "config.conflict", "PHASES.stages[0]", ""),
        ("{epochs: 0}", "config.wrong_type", "PHASES.stages[0].epochs", ""),
        ("{epochs: 1, name: 3}", "config.wrong_type", "PHASES.stages[0].name", ""),
        (
            "{epochs: 1, DATA: {TRAIN: {batch_size: x}}}",
            "config.wrong_type",
            "DATA.TRAIN.batch_size",
            "",
        ),
        (
            "{epochs: 1, DATA: {TRAIN: {batch_size: 30}}}",
            "config.indivisible",
            "OPTIMIZER.accumulate",
            "",
        ),
        ("{epochs: 1, continues: 1}", "config.wrong_type", "PHASES.stages[0].continues", ""),
        ("{epochs: 1, continues: true}", "config.conflict", "PHASES.stages[0].continues", ""),
        (
            "{epochs: 1}, {epochs: 1, continues: true, DATA: {TRAIN: {sampler: sequential}}}",
            "config.conflict",
            "PHASES.stages[1].DATA.TRAIN.sampler",
            "",
        ),
        (
            "{epochs: 1, DATA: {VALID: {transforms: []}}}",
            "config.unknown_split",
            "PHASES.stages[0].DATA.VALID",
            "",
        ),
        (
            "{epochs: 1, DATA: {TSET: {transforms: []}}}",
            "config.unknown_split",
            "PHASES.stages[0].DATA.TSET",
            "TEST",
        ),
    ],
)
def test_mistakes_in_a_stage_are_reported(stage: str, code: str, key: str, suggestion: str) -> None:
    found = find_problems(f"PHASES.stages=[{stage}]", "OPTIMIZER.accumulate=4")
    assert (code, key, suggestion) in [(one.code, one.key, one.suggestion) for one in found]


def test_all_mistakes_of_stages_are_reported_at_once() -> None:
    stages = "[{name: a}, {epochs: 1, TASK: {name: supervised}}]"
    assert [one.key for one in find_problems(f"PHASES.stages={stages}")] == [
        "PHASES.stages[0]",
        "PHASES.stages[1].TASK.name",
    ]
