"""Datasets without a length, and objects that are none; runs with an iterable resume exactly."""

import pytest
from raising import raises

from phasetrain.app.setup import resolve_config
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.tasks import Builder
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import BuiltRun, build_run

FORWARD = (
    "DATA.TRAIN.dataset=reading_parts.Shuffling",
    "DATA.TRAIN.batch_size=24",
    "MODEL={name: mlp, classes: 10, input_shape: [1, 8, 8]}",
)
UPDATES = "PHASES={epochs: null, updates: 6}"


def build(*words: str) -> BuiltRun:
    return build_run([*FORWARD, *words])


@pytest.mark.feature("data.iterables")
@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (["PHASES.epochs=2"], "data.no_length", "DATA.TRAIN.dataset"),
        ([UPDATES, "DATA.TEST.dataset=reading_parts.Shuffling"], "data.no_length", "DATA.TEST.dataset"),
        ([UPDATES, "DATA.TRAIN.sampler=infinite"], "config.conflict", "DATA.TRAIN.sampler"),
        ([UPDATES, "DATA.TRAIN.subset.samples=9"], "config.conflict", "DATA.TRAIN.subset"),
        ([UPDATES, "DATA.TRAIN.on_bad_sample=drop"], "config.conflict", "DATA.TRAIN.on_bad_sample"),
        ([UPDATES, "DATA.TRAIN.workers=2"], "config.conflict", "DATA.TRAIN.workers"),
        ([UPDATES, "DATA.TRAIN.loader=reading_parts.Stateful"], "config.conflict", "DATA.TRAIN.loader"),
        (["DATA.TRAIN.dataset=reading_parts.WrongLength", "DATA.TRAIN.length=-3"], "data.no_length", "DATA.TRAIN.dataset"),
        ([UPDATES, "DATA.TRAIN.dataset=reading_parts.WrongLength", "DATA.TRAIN.length=2.5"], "data.no_length", "DATA.TRAIN.dataset"),
        ([UPDATES, "DATA.TRAIN.dataset=reading_parts.open_nothing"], "data.no_dataset", "DATA.TRAIN.dataset"),
        ([UPDATES, "DATA.TRAIN.dataset=reading_parts.open_generator"], "data.no_dataset", "DATA.TRAIN.dataset"),
    ],
)  # fmt: skip
def test_dataset_without_a_length_is_rejected_with_a_key(
    words: list[str], code: str, key: str
) -> None:
    with raises(ConfigError, code=code, key=key):
        build(*words)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([UPDATES, "DATA.TRAIN.dataset=reading_parts.RankDependent"], "data.rank_dependent"),
        (
            [
                "DATA.TRAIN.dataset=reading_parts.Sharded",
                "PHASES.epochs=null",
                "PHASES.stages=[{updates: 2}, {updates: 2, DATA: {TRAIN: {batch_size: 12}}}]",
            ],
            "config.conflict",
        ),
    ],
)
def test_dataset_for_one_rank_that_does_not_fit_is_rejected(words: list[str], code: str) -> None:
    setup = resolve_config([*FORWARD, *words])
    world = World(rank=1, size=2)
    builder = Builder(setup.config, setup.machine, world, setup.stages)
    with raises(ConfigError, code=code):
        builder.data()


def test_error_names_updates_and_streams() -> None:
    with raises(ConfigError, code="data.no_length") as caught:
        build("PHASES.epochs=2")
    assert "PHASES.updates" in str(caught.value)
    assert "StreamDataset" in str(caught.value)


def test_iterable_with_a_length_is_tested_once_per_test() -> None:
    plan = build(UPDATES, "DATA.TEST.dataset=reading_parts.CountedShuffling").plan
    assert [phase.samples for phase in plan.phases if not phase.is_train] == [40]


def test_dataset_without_a_length_trains_for_updates() -> None:
    plan = build(UPDATES, "DATA.TRAIN.dataset=reading_parts.Unsized").plan
    assert plan.updates == 6


@pytest.mark.slow
def test_run_of_an_iterable_passes_the_proof_kit() -> None:
    words = [*FORWARD, UPDATES, "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]"]
    assert_exact_resume(words, workers=(0, 1))
