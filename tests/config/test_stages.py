from collections.abc import Callable
from pathlib import Path

import pytest

from phasetrain.commands.setup import settle
from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError

STAGED = "PHASES: {stages: [{epochs: 1}, {epochs: 2}]}\n"
TWO = "PHASES.stages=[{name: small, epochs: 2}, {updates: 5, DATA: {TRAIN: {batch_size: 32}}}]"


def stages(*words: str) -> tuple[AttrDict, ...]:
    return settle(words).stages


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settle(words)
    return str(caught.value)


def test_a_run_without_stages_has_none() -> None:
    assert stages() == ()
    assert list(settle([]).config.PHASES.stages) == []


def test_a_stage_is_the_config_with_its_changes_and_all_that_follows_from_it() -> None:
    first, second = stages(TWO, "OPTIMIZER.accumulate=4")
    assert (first.PHASES.epochs, first.PHASES.updates) == (2, None)
    assert (second.PHASES.epochs, second.PHASES.updates) == (None, 5)
    assert (first.DATA.TRAIN.batch_size, first.DATA.TRAIN.micro_batch_size) == (64, 16)
    assert (second.DATA.TRAIN.batch_size, second.DATA.TRAIN.micro_batch_size) == (32, 8)
    assert first.RUN == second.RUN == settle([TWO, "OPTIMIZER.accumulate=4"]).config.RUN


def test_another_name_drops_the_parameters_of_the_old_one() -> None:
    (stage,) = stages(
        "LOSS.label_smoothing=0.1", "PHASES.stages=[{epochs: 1, LOSS: {name: MSELoss}}]"
    )
    assert stage.LOSS == {"name": "MSELoss"}


def test_parameters_of_the_same_part_are_merged() -> None:
    (stage,) = stages("PHASES.stages=[{epochs: 1, LOSS: {label_smoothing: 0.2}}]")
    assert stage.LOSS == {"name": "cross_entropy", "label_smoothing": 0.2}


def test_the_length_of_the_highest_layer_counts(user_dir: Callable[..., Path]) -> None:
    setup = settle([TWO])  # the experiment asks for 12 epochs
    assert (setup.config.PHASES.epochs, len(setup.stages)) == (None, 2)
    assert any(line.startswith("PHASES.epochs: 12 -> null") for line in setup.derived)
    folder = user_dir({"experiment/staged.yaml": f"# @package _global_\n{STAGED}"})
    longer = settle(["experiment=staged", "PHASES.epochs=3"], config_dir=str(folder))
    assert (longer.config.PHASES.epochs, longer.stages) == (3, ())
    assert any(line.startswith("PHASES.stages: ") for line in longer.derived)


def test_what_is_one_for_the_whole_run() -> None:
    text = refused("PHASES.stages=[{epochs: 1, MODEL: {width: 8}}, {epochs: 1, RUN: {seed: 1}}]")
    assert "PHASES.stages[0].MODEL.width: this is one for the whole run" in text
    assert "PHASES.stages[1].RUN.seed: this is one for the whole run" in text
    assert (
        "A stage may change DATA.*.batch_transforms, DATA.*.transforms, DATA.TRAIN.batch_size"
        in text
    )


def test_near_misses() -> None:
    assert "did you mean 'epochs'?" in refused("PHASES.stages=[{epoch: 1, updates: 3}]")
    text = refused("PHASES.stages=[{epochs: 1, OPTIMIZER: {SCHEDULES: {lr: {name: cosin}}}}]")
    assert "did you mean 'cosine'?" in text
    assert "PHASES.stages[0]" in text


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("{name: a}", "PHASES.stages[0] has no length; give it one of epochs, updates, samples"),
        (
            "{epochs: 1, updates: 2}",
            "PHASES.stages[0] has epochs: 1 and updates: 2; give it one of",
        ),
        ("{epochs: 0}", "PHASES.stages[0]: epochs = 0: expected a whole number of at least 1"),
        ("{epochs: 1, name: 3}", "PHASES.stages[0].name = 3: expected a word"),
        (
            "{epochs: 1, DATA: {TRAIN: {batch_size: x}}}",
            "DATA.TRAIN.batch_size = 'x' (PHASES.stages[0]): expected int",
        ),
        ("{epochs: 1, DATA: {TRAIN: {batch_size: 30}}}", "OPTIMIZER.accumulate = 4"),
        (
            "{epochs: 1, DATA: {VALID: {transforms: []}}}",
            "PHASES.stages[0].DATA.VALID: the run has no such split",
        ),
        ("{epochs: 1, DATA: {TSET: {transforms: []}}}", "did you mean 'TEST'?"),
    ],
)
def test_mistakes_in_a_stage(stage: str, message: str) -> None:
    assert message in refused(f"PHASES.stages=[{stage}]", "OPTIMIZER.accumulate=4")


def test_all_mistakes_at_once() -> None:
    text = refused("PHASES.stages=[{name: a}, {epochs: 1, TASK: {name: supervised}}]")
    assert "PHASES.stages[0] has no length" in text
    assert "PHASES.stages[1].TASK.name" in text
