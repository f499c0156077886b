"""Datasets without a length, and objects that are none; runs with an iterable resume exactly."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from raising import raises
from torch.utils.data import Dataset

from phasetrain.app.setup import resolve_config
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import reseed_all, seed_of
from phasetrain.tasks import Builder
from phasetrain.tasks.build import dataset_builder
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import BuiltRun, build_run, resolve_overrides

FORWARD = (
    "DATA.TRAIN.dataset=reading_parts.Shuffling",
    "DATA.TRAIN.batch_size=24",
    "MODEL={name: mlp, classes: 10, input_shape: [1, 8, 8]}",
)
UPDATES = "PHASES={epochs: null, updates: 6}"
ENDLESS = ("DATA.TRAIN.dataset=reading_parts.EndlessNumbers",)


def build(*words: str) -> BuiltRun:
    return build_run([*FORWARD, *words])


@pytest.mark.feature("data.iterables")
@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (["PHASES.epochs=2", *ENDLESS], "data.no_length", "DATA.TRAIN.dataset"),
        (["PHASES.epochs=2", "DATA.TRAIN.dataset=reading_parts.Unsized"], "data.no_length", "DATA.TRAIN.dataset"),
        ([UPDATES, "DATA.TEST.dataset=reading_parts.EndlessNumbers"], "data.no_length", "DATA.TEST.dataset"),
        ([UPDATES, "DATA.TEST.dataset=reading_parts.Unsized"], "data.no_length", "DATA.TEST.dataset"),
        pytest.param(
            [UPDATES, "DATA.TRAIN.sampler=infinite"],
            "config.conflict",
            "DATA.TRAIN.sampler",
            marks=pytest.mark.addon("sampling"),
        ),
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
    words: list[str], code: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_builder, "MOST_COUNTED", 100)
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
        build("PHASES.epochs=2", "DATA.TRAIN.dataset=reading_parts.Unsized")
    assert "PHASES.updates" in str(caught.value)
    assert "StreamDataset" in str(caught.value)


def test_iterable_with_a_length_is_tested_once_per_test() -> None:
    plan = build(UPDATES, "DATA.TEST.dataset=reading_parts.CountedShuffling").plan
    assert [phase.samples for phase in plan.phases if not phase.is_train] == [40]


@pytest.mark.feature("data.iterables")
@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (["DATA.TEST.dataset=reading_parts.Shuffling"], 40),
        (["DATA.TEST.dataset=reading_parts.Shuffling", "PHASES.limit.test=3"], 30),
        # More batches than there are: the pass ends with the data.
        (["DATA.TEST.dataset=reading_parts.Shuffling", "PHASES.limit.test=9"], 40),
        (["DATA.TEST.dataset=reading_parts.EndlessNumbers", "PHASES.limit.test=3"], 30),
    ],
)
def test_samples_of_a_test_without_a_length_are_counted(words: list[str], samples: int) -> None:
    built = build(UPDATES, "DATA.TEST.batch_size=10", *words)
    assert [phase.samples for phase in built.plan.phases if not phase.is_train] == [samples]


@pytest.mark.parametrize("name", ["Shuffling", "CountedShuffling"])
def test_epoch_of_an_iterable_ends_with_its_samples(name: str) -> None:
    built = build(
        "PHASES.epochs=3", "DATA.TRAIN.batch_size=15", f"DATA.TRAIN.dataset=reading_parts.{name}"
    )
    trained = [phase for phase in built.plan.phases if phase.is_train]
    assert [(phase.steps, phase.end) for phase in trained] == [(2, 30)] * 3
    sampler = built.task.parts.loaders["train"].sampler
    firsts = [next(iter(sampler.steps(phase)))[0].indices[0] for phase in trained]
    assert firsts == [0, 40, 80]  # each pass draws other random numbers


@pytest.mark.parametrize("name", ["reading_parts.Shuffling", "stream_parts.Counted"])
def test_epochs_of_an_iterable_resume_exactly(name: str, tmp_path: Path) -> None:
    words = [
        *(f"DATA.TRAIN.dataset={name}", "DATA.TEST.dataset=reading_parts.Shuffling"),
        *("PHASES.epochs=3", "DATA.TRAIN.batch_size=15", "DATA.TEST.batch_size=15"),
        "PHASES.limit.train=null",
        *("MODEL.classes=10", "MODEL={name: small_cnn, channels: 1, width: 4}"),
    ]
    done = train(tmp_path / "whole", *words)
    length = {"reading_parts.Shuffling": 40, "stream_parts.Counted": 70}[name]
    assert done.updates == 3 * (length // 15)
    for steps in (1, 4, 6):
        hooks = {"save": SaveEachStep(), "kill": KillAfter(steps)}
        run_until_killed(tmp_path / "run", *words, hooks=hooks)
    train(tmp_path / "run", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


def test_dataset_without_a_length_trains_for_updates() -> None:
    plan = build(UPDATES, "DATA.TRAIN.dataset=reading_parts.Unsized").plan
    assert plan.updates == 6


@pytest.mark.slow
def test_run_of_an_iterable_passes_the_proof_kit() -> None:
    words = [*FORWARD, UPDATES, "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]"]
    assert_exact_resume(words, workers=(0, 1))


class Drawn(Dataset[Any]):
    """Rows of random numbers, drawn when the dataset is built."""

    classes = 10

    def __init__(self, samples: int) -> None:
        self.rows = torch.stack([torch.randn(4) for _ in range(samples)])
        self.numbers = [random.random(), float(np.random.rand())]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], 0


class DrawnForSplit(Drawn):
    """The same for a class that knows its split, such as one that divides samples at random."""

    def __init__(self, samples: int, split: str = "train") -> None:
        super().__init__(samples)


@pytest.mark.feature("seeds.datasets", "test splits draw other random numbers than `TRAIN`")
@pytest.mark.parametrize(
    ("name", "purpose", "mark"), [("Drawn", ["test"], "-drawn"), ("DrawnForSplit", [], "")]
)
def test_dataset_of_a_test_split_draws_its_own_random_numbers(
    name: str, purpose: list[str], mark: str
) -> None:
    words = [f"DATA.{key}.dataset={__name__}.{name}" for key in ("TRAIN", "TEST")]
    words += ["DATA.TRAIN.samples=32", "DATA.TEST.samples=8", "RUN.dir=x"]
    data = resolve_overrides(words).builder().data()
    for split, own in (("train", []), ("test", purpose)):
        reseed_all(seed_of(0, "init", "data", *own))
        expected = Drawn(len(data[split].reader.dataset))
        dataset: Any = data[split].reader.dataset
        assert torch.equal(dataset.rows, expected.rows)
        assert dataset.numbers == expected.numbers
    # A resume of a run of an earlier version reports the other samples.
    old = f"{__name__}.{name}:8"
    assert data["test"].fingerprint() == old + mark
    assert data["test"].has_fingerprint(old) == (not mark)
    assert data["train"].fingerprint() == f"{__name__}.{name}:32"
