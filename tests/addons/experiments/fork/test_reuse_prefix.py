"""A run started alone is forked from the run next to it that shares most updates with it."""

import json
from pathlib import Path

import pytest
from harness import KillAfter, differences_of_runs, run_until_killed, status, train

WORDS = ("PHASES.epochs=2", "MODEL.width=2")
EARLY = "OPTIMIZER.SCHEDULES.lr={name: multistep, milestones: [3 updates]}"
LATE = "OPTIMIZER.SCHEDULES.lr={name: multistep, milestones: [7 updates]}"
REUSE = "RUN.reuse_prefix=true"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs: one from scratch, and one that shares its first three updates."""
    root = tmp_path_factory.mktemp("runs")
    train(root / "other" / "late", *WORDS, LATE)
    keep = ("CHECKPOINT.every_updates=2", "CHECKPOINT.keep_every.updates=2")
    train(root / "early", *WORDS, EARLY, *keep)
    train(root / "seed", *WORDS, LATE, *keep, "RUN.seed=1")
    return root


@pytest.mark.feature("sweep.shared_prefixes")
def test_run_is_forked_from_the_newest_checkpoint_that_it_shares(runs: Path) -> None:
    folder = runs / "late"
    run_until_killed(folder, *WORDS, LATE, REUSE, hooks={"kill": KillAfter(3)})
    assert status(folder)["resumed_at"] == 2
    train(folder, *WORDS, LATE, REUSE)
    assert differences_of_runs(runs / "other" / "late", folder) == []
    assert json.loads((folder / "environment.json").read_text())["departures"] == []


def test_run_is_not_forked_unless_it_asks(runs: Path) -> None:
    assert train(runs / "plain", *WORDS, LATE, "RUN.pause_at=1").updates == 1
    assert status(runs / "plain")["resumed_at"] == 0


@pytest.mark.parametrize("word", ["OPTIMIZER.lr=0.3", "MACHINE.threads=2"])
def test_run_that_shares_nothing_starts_from_scratch(runs: Path, word: str) -> None:
    folder = runs / word.partition(".")[0].lower()
    assert train(folder, *WORDS, LATE, REUSE, word, "RUN.pause_at=1").updates == 1
    assert status(folder)["resumed_at"] == 0


def test_damaged_run_is_passed_over(runs: Path) -> None:
    broken = runs / "broken" / "checkpoints" / "p0000-s00000002"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text("{")
    done = train(runs / "again", *WORDS, LATE, REUSE, "RUN.pause_at=4")
    assert (done.updates, status(runs / "again")["resumed_at"]) == (4, 2)
