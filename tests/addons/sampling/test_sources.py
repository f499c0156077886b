"""Sources with their own batch sizes, transforms and collation: batches, and runs that are killed
or change their number of workers and ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, newest, records, status
from processes import Launcher
from raising import raises

from phasetrain.addons.sampling.mixture import make_mixed
from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.app.setup import resolve_config
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.build import build_run

pytestmark = pytest.mark.addon("sampling", "vision")  # `multi_crop`

VIEW = "{views: 1, transforms: [{name: noise, std: 0.2}]}"
VIEWS = f"{{name: multi_crop, groups: [{VIEW}, {VIEW}]}}"
LABELLED = "labelled: {dataset: digits, subset: {samples: 40, balanced: true}, batch_size: 8}"
UNLABELLED = f"unlabelled: {{dataset: digits, batch_size: 24, targets: [], transforms: [{VIEWS}]}}"
SOURCES = f"DATA.TRAIN.datasets={{{LABELLED}, {UNLABELLED}}}"
WORDS = (
    "RUN.imports=[source_parts]",
    "RUN.rehearse=false",
    "TASK.name=consistent",
    "DATA.TRAIN.dataset=mixed",
    "DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}]",
    SOURCES,
    "DATA.TRAIN.epoch=labelled",
    "DATA.TEST.subset.samples=64",
    "MODEL=mlp",
    "MODEL.dropout=0.2",
    "PHASES.epochs=2",
    "MACHINE.threads=1",
    "HOOKS.console=null",
    "HOOKS.metrics.every_updates=1",
)
# Five updates and a test of one batch in each epoch.
STEPS = 2 * (5 + 1)


def train(folder: Path, *words: str, hooks: dict[str, Hook] | None = None) -> RunResult:
    return run([*WORDS, *words, f"RUN.dir={folder}"], hooks=hooks, terminal=Terminal(live=False))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    assert (train(folder).updates, newest(folder).manifest.state["samples"]) == (10, 320)
    return folder


def batches(*words: str) -> list[Any]:
    made = build_run([*WORDS, *words])
    try:
        phases = [phase for phase in made.plan.phases if phase.is_train]
        return [step for phase in phases for step in made.task.batches(phase, 0)]
    finally:
        made.task.close()


@pytest.mark.feature(
    "data.sources",
    "sources with their own batch sizes, transforms and collation",
    "`DATA.TRAIN.datasets.*.batch_size` with `mixed`",
)
def test_batch_has_its_number_of_samples_of_each_source() -> None:
    steps = batches()
    assert len(steps) == 10
    labelled = []
    for [batch] in steps:
        assert (batch.size, tuple(batch.input["labelled"].shape)) == (32, (8, 1, 8, 8))
        assert [tuple(view.shape) for view in batch.input["unlabelled"]] == [(24, 1, 8, 8)] * 2
        assert batch.target["unlabelled"] is None
        assert tuple(batch.target["labelled"].shape) == (8,)
        is_labelled = batch.ids < 40
        assert is_labelled.reshape(8, 4).sum(1).tolist() == [1] * 8, "one in each part of four"
        labelled += batch.ids[is_labelled].tolist()
    first, second = labelled[:40], labelled[40:]
    assert sorted(first) == sorted(second) == list(range(40)), "an epoch of the labelled source"
    assert first != second


def test_shorter_source_begins_again_in_another_order() -> None:
    steps = batches("DATA.TRAIN.epoch=longest", "PHASES.epochs=1", "PHASES.limit.train=15")
    found = torch.cat([batch.ids[batch.ids < 40] for [batch] in steps]).reshape(3, 40)
    assert [sorted(row) for row in found.tolist()] == [list(range(40))] * 3
    assert len({tuple(row) for row in found.tolist()}) == 3
    others = torch.cat([batch.ids[batch.ids >= 40] for [batch] in steps])
    assert len(others.unique()) == len(others) == 15 * 24


@pytest.mark.parametrize(
    ("epoch", "updates"),
    [("first", 5), ("shortest", 5), ("longest", 60), ("unlabelled", 60), ("labelled", 5)],
)
def test_one_source_decides_the_length_of_an_epoch(epoch: str, updates: int) -> None:
    datasets = {
        "labelled": {"dataset": "digits", "subset": {"samples": 40}, "batch_size": 8},
        "unlabelled": {"dataset": "digits", "batch_size": 24},
    }
    mixture = make_mixed(datasets, epoch=epoch, split="train")
    assert mixture.batches is not None
    assert mixture.batches.count_batches(mixture.source_lengths) == updates


def test_random_numbers_do_not_depend_on_the_size_of_micro_batches() -> None:
    [whole] = batches("PHASES.limit.train=1", "PHASES.epochs=1")[0]
    halves = batches("PHASES.limit.train=1", "PHASES.epochs=1", "OPTIMIZER.accumulate=2")[0]
    assert len(halves) == 2
    assert torch.equal(whole.ids, torch.cat([half.ids for half in halves]))
    for label in ("labelled", "unlabelled"):
        parts = [half.input[label] for half in halves]
        if label == "labelled":
            assert torch.equal(whole.input[label], torch.cat(parts))
        else:
            for view, *views in zip(whole.input[label], *parts, strict=True):
                assert torch.equal(view, torch.cat(views))


@pytest.mark.feature("data.sources")
@pytest.mark.parametrize("steps", [8, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 5))])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_run_resumes_exactly(
    unbroken: Path, tmp_path: Path, steps: int, workers: int
) -> None:
    with pytest.raises(Killed):
        train(
            tmp_path,
            f"DATA.TRAIN.workers={2 - workers}",
            hooks={"save": SaveEachStep(), "kill": KillAfter(steps)},
        )
    train(tmp_path, f"DATA.TRAIN.workers={workers}")
    assert differences_of_runs(unbroken, tmp_path) == []


@pytest.mark.slow
def test_ordered_runs_of_one_and_two_ranks_have_equal_bits(
    launcher: Launcher, tmp_path: Path
) -> None:
    words = (*WORDS, "DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=4")
    for size in (1, 2):
        done = launcher.run(tmp_path / f"ranks{size}", size, *words)
        assert done.codes == [0] * size, done.outputs
    digests = [status(tmp_path / f"ranks{size}")["digest"] for size in (1, 2)]
    assert digests[0] == digests[1]
    losses = [
        [one["loss"] for one in records(tmp_path / f"ranks{size}") if one["kind"] == "step"]
        for size in (1, 2)
    ]
    assert losses[0] == losses[1]


def test_batch_size_is_the_sum_and_may_not_contradict_it() -> None:
    assert resolve_config(list(WORDS)).config.DATA.TRAIN.batch_size == 32
    with raises(ConfigError, code="config.conflict", key="DATA.TRAIN.batch_size"):
        resolve_config([*WORDS, "DATA.TRAIN.batch_size=64"])


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("OPTIMIZER.accumulate=16", "config.indivisible"),
        ("DATA.TRAIN.sampler=sequential", "config.conflict"),
        ("DATA.TRAIN.on_bad_sample=drop", "config.conflict"),
        ("DATA.TRAIN.batch_transforms=[mixing_parts.Blended]", "config.conflict"),
        ("DATA.TRAIN.epoch=labeled", "config.rejected_by_part"),
        ("DATA.TRAIN.datasets.labelled.batch_size=0", "config.rejected_by_part"),
    ],
)
def test_key_that_does_not_fit_is_rejected(word: str, code: str) -> None:
    with raises(ConfigError, code=code):
        build_run([*WORDS, word])


def test_unreadable_sample_is_named_with_its_source_and_replaced() -> None:
    other = "other: {dataset: source_parts.Unreadable, batch_size: 20}"
    words = [
        "RUN.imports=[source_parts]",
        "DATA.TRAIN.dataset=mixed",
        "DATA.TRAIN.transforms=[]",
        f"DATA.TRAIN.datasets={{labelled: {{dataset: digits, batch_size: 20}}, {other}}}",
    ]
    index = 1442 + 3
    indices = np.array([0, index, 1, index + 1], dtype=np.int64)
    draw = Draw("train", 0, 0, indices)
    with pytest.raises(Exception, match=r"sample 3 .*datasets\.other"):
        build_run(words).task.parts.loaders["train"].reader[draw]
    made = build_run([*words, "DATA.TRAIN.on_bad_sample=substitute"])
    batch = made.task.parts.loaders["train"].reader[draw]
    assert [number for number, _ in batch.bad] == [index]
    assert batch.ids[[0, 2, 3]].tolist() == [0, 1, index + 1]
    assert batch.ids[1] >= 1442
    assert float(batch.input["other"][0, 0, 0, 0]) == int(batch.ids[1]) - 1442
