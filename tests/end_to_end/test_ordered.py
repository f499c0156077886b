"""DISTRIBUTED.reduction=ordered: the same bits on any number of processes."""

import shutil
from pathlib import Path

import pytest
from harness import SMALL, newest, records, train
from processes import Launcher
from raising import raises
from test_processes import ONE, STRIKE

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.errors import ConfigError
from phasetrain.testing import differences

# 1,442 samples in batches of 240: the last batch of an epoch has two, so that most shards are empty.
WORDS = (
    *SMALL,
    ONE,
    "PHASES.epochs=1",
    "PHASES.limit.train=null",
    "DATA.TRAIN.batch_size=240",
    "DATA.TRAIN.drop_last=false",
)
ORDERED = (*WORDS, "DISTRIBUTED.reduction=ordered")
UPDATES = 7


def trained_state(folder: Path) -> dict[str, object]:
    loaded: LoadedCheckpoint = newest(folder)
    return {name: loaded.state["task"][name] for name in ("model", "loss", "updater")}


def losses(folder: Path) -> list[object]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an ordered run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(folder, *ORDERED).updates == UPDATES
    return folder


@pytest.fixture(scope="module")
def two_ranks(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an ordered run of two processes."""
    folder = tmp_path_factory.mktemp("two") / "run"
    assert launcher.run(folder, 2, *ORDERED).codes == [0, 0]
    return folder


@pytest.fixture(scope="module")
def two_ranks_native(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two processes whose gradients are summed as gloo does."""
    folder = tmp_path_factory.mktemp("native") / "run"
    assert launcher.run(folder, 2, *WORDS).codes == [0, 0]
    return folder


@pytest.mark.feature(
    "69", "logged losses are global means; data time is the slowest rank's", "`metrics.jsonl`"
)
def test_weights_and_losses_of_two_ranks_are_those_of_one(alone: Path, two_ranks: Path) -> None:
    assert differences(trained_state(alone), trained_state(two_ranks), "task") == []
    assert len(losses(alone)) == UPDATES
    assert losses(two_ranks) == losses(alone)


@pytest.mark.slow
def test_weights_and_losses_of_four_ranks_are_those_of_one(
    launcher: Launcher, alone: Path, tmp_path: Path
) -> None:
    assert launcher.run(tmp_path / "run", 4, *ORDERED).codes == [0] * 4
    assert differences(trained_state(alone), trained_state(tmp_path / "run"), "task") == []
    assert losses(tmp_path / "run") == losses(alone)


@pytest.mark.feature("B2")
def test_weights_are_equal_if_the_world_size_changes_on_the_way(
    launcher: Launcher, alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = (*ORDERED, STRIKE, "CHECKPOINT.every_updates=1")
    assert launcher.run(folder, 2, *words, "HOOKS.strike={rank: 1, update: 2}").codes[1] == -9
    assert launcher.run(folder, 4, *words, "HOOKS.strike={rank: 3, update: 4}").codes[3] == -9
    assert 1 < newest(folder).manifest.state["updates"] <= 4
    assert train(folder, *ORDERED).updates == UPDATES
    assert differences(trained_state(alone), trained_state(folder), "task") == []


@pytest.mark.slow
def test_weights_depend_on_the_world_size_with_native_reduction(
    two_ranks_native: Path, tmp_path: Path
) -> None:
    train(tmp_path / "one", *WORDS)
    assert (
        differences(trained_state(tmp_path / "one"), trained_state(two_ranks_native), "task") != []
    )


@pytest.mark.addon("experiments")
def test_comparison_and_replay_ignore_the_world_size(
    alone: Path, two_ranks: Path, tmp_path: Path
) -> None:
    from phasetrain.addons.experiments.compare.diff import diff

    found = diff(str(alone), str(two_ranks))
    # Sums of meters over processes: the last bit of a mean loss.
    assert found.components == ("metrics",)
    assert found.updates == UPDATES
    assert found.config == ()
    folder = shutil.copytree(two_ranks, tmp_path / "run", symlinks=True)
    assert train(folder, *ORDERED, "RUN.engine=replay", "RUN.step=6").exit_code == 0


@pytest.mark.addon("experiments")
@pytest.mark.slow
def test_replay_of_a_sum_over_ranks_compares_the_shared_part(
    launcher: Launcher, two_ranks_native: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(two_ranks_native, tmp_path / "run", symlinks=True)
    ended = launcher.run(folder, 1, *WORDS, "RUN.engine=replay", "RUN.step=6")
    assert ended.codes == [0], ended.outputs
    assert "world size 2" in ended.outputs[0]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("OPTIMIZER.accumulate=2", "OPTIMIZER.accumulate"),
        pytest.param(
            *("DISTRIBUTED.strategy=zero", "DISTRIBUTED.reduction"),
            marks=pytest.mark.addon("sharding"),
        ),
    ],
)
def test_conflicting_setting_is_rejected(tmp_path: Path, words: str, key: str) -> None:
    with raises(ConfigError, code="config.conflict", key=key):
        train(tmp_path / "run", *ORDERED, words)


@pytest.mark.slow
def test_world_size_that_does_not_divide_the_shards_is_rejected(
    launcher: Launcher, tmp_path: Path
) -> None:
    ended = launcher.run(tmp_path / "run", 3, *ORDERED)
    assert ended.codes == [2, 2, 2]
    assert "DISTRIBUTED.virtual_shards = 8" in ended.outputs[0]
