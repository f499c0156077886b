"""Orders, mixed data and loaders of one's own in runs of several processes: the same bits after a
kill."""

from pathlib import Path

import pytest
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    status,
    train,
)
from processes import Launcher

WORDS = (*SMALL, "MACHINE.threads=1", "RUN.imports=[process_parts]", "CHECKPOINT.every_updates=2")
KILL = "HOOKS.strike={rank: 1, update: 8}"

CASES = {
    "proportional": (
        "DATA.TRAIN={dataset: mixed, datasets: {a: {dataset: digits}, b: {dataset: digits, split: test}}}",
        "DATA.TRAIN.sampler={name: proportional, proportions: {a: 1, b: 2}}",
    ),
    "torch": (
        "DATA.TRAIN.sampler=reading_parts.Backwards",
        "DATA.TRAIN.subset={samples: 200, balanced: true}",
    ),
    "own": ("DATA.TRAIN.loader=reading_parts.Stateful", "DATA.TRAIN.transforms=[]"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["own", "torch", pytest.param("proportional", marks=pytest.mark.addon("sampling"))],
)
def test_three_ranks_resume_after_one_is_killed(
    launcher: Launcher, tmp_path: Path, name: str
) -> None:
    words = (*WORDS, *CASES[name])
    unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
    done = launcher.run(unbroken, 3, *words)
    assert (done.codes, done.alive) == ([0, 0, 0], []), done.outputs

    broken = launcher.run(folder, 3, *words, KILL)

    assert broken.codes[1] == -9, broken.outputs
    assert 0 < newest(folder).manifest.state["updates"] < 15
    again = launcher.run(folder, 3, *words, KILL)
    assert again.codes == [0, 0, 0], again.outputs
    assert differences_of_runs(unbroken, folder) == []


@pytest.mark.slow
def test_another_world_size_cannot_resume_inside_a_custom_loader(
    launcher: Launcher, tmp_path: Path
) -> None:
    words = (*WORDS, *CASES["own"])
    broken = launcher.run(tmp_path / "run", 3, *words, KILL)
    assert broken.codes[1] == -9, broken.outputs
    other = launcher.run(tmp_path / "run", 2, *words, KILL)
    assert other.codes == [3, 3], other.outputs
    assert "a world size of 2, and the checkpoint has batch 1 of epoch 1" in other.outputs[0]
    assert "with a world size of 3" in other.outputs[0]


@pytest.mark.feature("data.iterables")
def test_killed_run_of_an_iterable_reads_up_to_its_position(tmp_path: Path) -> None:
    words = (
        *("DATA.TRAIN.dataset=reading_parts.Shuffling", "MODEL.classes=10", "MODEL.channels=1"),
        *("PHASES={epochs: null, updates: 8}", "PHASES.limit.train=null"),
    )
    train(tmp_path / "unbroken", *words)
    hooks = {"save": SaveEachStep(), "kill": KillAfter(5)}
    run_until_killed(tmp_path / "run", *words, hooks=hooks)
    train(tmp_path / "run", *words, "DATA.TRAIN.workers=1")
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


ITERABLE = (
    *("RUN.imports=[process_parts]", "MODEL=mlp", "MODEL.classes=10", "MODEL.input_shape=[1,8,8]"),
    *("DATA.TRAIN.batch_size=24", "DATA.TRAIN.transforms=[]", "DATA.TEST=null"),
    *("PHASES={epochs: null, updates: 8}", "CHECKPOINT.every_updates=2", "MACHINE.threads=1"),
    *("HOOKS.metrics.every_updates=1", "HOOKS.console=null", "METERS={}"),
)


@pytest.mark.feature(
    "data.iterables",
    "iterable datasets and datasets without a length, on any number of ranks, with exact resume",
    "`DATA.TRAIN.dataset`, `PHASES.updates`",
)
@pytest.mark.slow
def test_two_ranks_read_the_iterable_of_one_and_resume_exactly(
    launcher: Launcher, tmp_path: Path
) -> None:
    words = (*ITERABLE, "DATA.TRAIN.dataset=reading_parts.Shuffling")
    words = (*words, "DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=2")
    for size in (1, 2):
        done = launcher.run(tmp_path / f"ranks{size}", size, *words)
        assert done.codes == [0] * size, done.outputs
    assert status(tmp_path / "ranks1")["digest"] == status(tmp_path / "ranks2")["digest"]
    broken = launcher.run(tmp_path / "run", 2, *words, "HOOKS.strike={rank: 1, update: 5}")
    assert broken.codes[1] == -9, broken.outputs
    again = launcher.run(tmp_path / "run", 2, *words, "DATA.TRAIN.workers=1")
    assert again.codes == [0, 0], again.outputs
    assert status(tmp_path / "run")["digest"] == status(tmp_path / "ranks2")["digest"]


@pytest.mark.slow
def test_iterable_that_yields_the_samples_of_a_rank_resumes_exactly_with_as_many(
    launcher: Launcher, tmp_path: Path
) -> None:
    words = (*ITERABLE, "DATA.TRAIN.dataset=reading_parts.Sharded")
    kill = "HOOKS.strike={rank: 1, update: 5}"
    done = launcher.run(tmp_path / "unbroken", 2, *words)
    assert done.codes == [0, 0], done.outputs
    broken = launcher.run(tmp_path / "run", 2, *words, kill)
    assert broken.codes[1] == -9, broken.outputs
    other = launcher.run(tmp_path / "run", 1, *words, kill)
    assert other.codes == [3], other.outputs
    assert "RUN.allow=[data]" in other.outputs[0]
    again = launcher.run(tmp_path / "run", 2, *words, kill)
    assert again.codes == [0, 0], again.outputs
    assert status(tmp_path / "run")["digest"] == status(tmp_path / "unbroken")["digest"]


@pytest.mark.feature(
    "data.drawing_samples",
    "samples are seeded only if they draw; `__getitems__`; transforms of stacked samples",
    "`benchmarks/custom_dataset.py`",
)
def test_dataset_that_draws_rarely_resumes_exactly_with_other_workers(tmp_path: Path) -> None:
    words = (
        "DATA.TRAIN.dataset=reading_parts.RarelyNoisy",
        "DATA.TRAIN.transforms=[]",
        "MODEL.classes=10",
        "MACHINE.threads=1",
    )
    train(tmp_path / "unbroken", *words, "DATA.TRAIN.workers=2")
    hooks = {"save": SaveEachStep(), "kill": KillAfter(9)}
    run_until_killed(tmp_path / "run", *words, "DATA.TRAIN.workers=0", hooks=hooks)
    train(tmp_path / "run", *words, "DATA.TRAIN.workers=1")
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


@pytest.mark.addon("deploy")
def test_features_of_a_subset_have_the_ids_of_the_dataset(tmp_path: Path) -> None:
    from phasetrain.addons.deploy.extract.feature_files import read_columns

    words = ("DATA.TRAIN.subset={samples: 120, balanced: true}", "PHASES.epochs=1")
    train(tmp_path / "run", *words)
    extract = ("RUN.engine=extract", f"EXTRACT.dir={tmp_path / 'out'}", "EXTRACT.layers=[dropout]")
    assert train(tmp_path / "run", *words, *extract).state == "extracted"
    found = read_columns(f"{tmp_path}/out/train", ["id", "target"])
    assert (len(found["id"]), int(found["id"].max()) > 1000) == (120, True)
    assert found["target"].bincount(minlength=10).tolist() == [12] * 10
