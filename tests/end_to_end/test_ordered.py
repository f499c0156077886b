"""DISTRIBUTED.reduction=ordered: the same bits on any number of processes."""

from pathlib import Path

import pytest
from harness import SMALL, newest, records
from processes import Launcher
from test_processes import ONE, STRIKE

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.commands.runs.diff import diff
from phasetrain.testing import differences

# 1,442 samples in batches of 72: the last batch of an epoch has two, so that most shards are empty.
WORDS = (
    *SMALL,
    ONE,
    "PHASES.epochs=1",
    "PHASES.limit.train=null",
    "DATA.TRAIN.batch_size=72",
    "DATA.TRAIN.drop_last=false",
)
ORDERED = (*WORDS, "DISTRIBUTED.reduction=ordered")


def learned(folder: Path) -> dict[str, object]:
    loaded: LoadedCheckpoint = newest(folder)
    return {name: loaded.state["task"][name] for name in ("model", "loss", "updater")}


def losses(folder: Path) -> list[object]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


@pytest.fixture(scope="module")
def alone(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert launcher.run(folder, 1, *ORDERED).codes == [0]
    return folder


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_weights_and_losses_are_those_of_one_process(
    launcher: Launcher, alone: Path, tmp_path: Path, size: int
) -> None:
    assert launcher.run(tmp_path / "run", size, *ORDERED).codes == [0] * size
    assert differences(learned(alone), learned(tmp_path / "run"), "task") == []
    assert len(losses(alone)) == 21
    assert losses(tmp_path / "run") == losses(alone)


def test_weights_are_equal_if_the_world_size_changes_on_the_way(
    launcher: Launcher, alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = (*ORDERED, STRIKE, "CHECKPOINT.every_updates=3", "HOOKS.strike={rank: 1, update: 8}")
    assert launcher.run(folder, 2, *words).codes[1] == -9
    again = ("HOOKS.strike={rank: 3, update: 14}", "CHECKPOINT.every_updates=3")
    assert launcher.run(folder, 4, *ORDERED, STRIKE, *again).codes[3] == -9
    assert launcher.run(folder, 1, *ORDERED).codes == [0]
    assert differences(learned(alone), learned(folder), "task") == []


def test_without_it_they_differ(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(tmp_path / "one", 1, *WORDS).codes == [0]
    assert launcher.run(tmp_path / "two", 2, *WORDS).codes == [0, 0]
    assert differences(learned(tmp_path / "one"), learned(tmp_path / "two"), "task") != []


@pytest.mark.parametrize(
    ("size", "words", "told"),
    [
        (
            3,
            (),
            "DISTRIBUTED.virtual_shards = 8 and 3 processes: DISTRIBUTED.reduction = 'ordered' works on 1, 2, 4, ",
        ),
        (
            1,
            ("DISTRIBUTED.virtual_shards=6",),
            "virtual_shards = 6: expected a power of two, such as 4 or 8",
        ),
        (1, ("DISTRIBUTED.virtual_shards=16",), "does not divide DATA.TRAIN.batch_size = 72"),
        (
            1,
            ("OPTIMIZER.accumulate=2",),
            "OPTIMIZER.accumulate = 2 and DISTRIBUTED.reduction = 'ordered'",
        ),
        (
            2,
            ("DISTRIBUTED.strategy=zero",),
            "and DISTRIBUTED.strategy = 'zero': ordered reduction sums the gradients itself",
        ),
    ],
)
def test_setting_that_does_not_fit_is_rejected(
    launcher: Launcher, tmp_path: Path, size: int, words: tuple[str, ...], told: str
) -> None:
    ended = launcher.run(tmp_path / "run", size, *ORDERED, *words)
    assert ended.codes == [2] * size
    assert told in ended.outputs[0]


def test_comparison_and_replay_ignore_the_world_size(
    launcher: Launcher, alone: Path, tmp_path: Path
) -> None:
    assert launcher.run(tmp_path / "run", 2, *ORDERED).codes == [0, 0]
    found = diff(str(alone), str(tmp_path / "run"))
    assert found.components == (
        "metrics",
    )  # sums of meters over processes: the last bit of a mean loss
    assert found.updates == 21
    assert found.config == ()
    ended = launcher.run(tmp_path / "run", 1, *ORDERED, "RUN.engine=replay", "RUN.step=16")
    assert ended.codes == [0], ended.outputs


def test_replay_of_a_sum_over_ranks_compares_the_shared_part(
    launcher: Launcher, tmp_path: Path
) -> None:
    assert launcher.run(tmp_path / "run", 2, *WORDS).codes == [0, 0]
    ended = launcher.run(tmp_path / "run", 1, *WORDS, "RUN.engine=replay", "RUN.step=16")
    assert ended.codes == [0], ended.outputs
    assert "the run had world size 2, the replay has one process" in ended.outputs[0]
