"""A rehearsal of several processes leaves no trace in what they compute."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, differences_of_runs
from processes import Launcher

REHEARSED, WITHOUT = "RUN.rehearse=true", "RUN.rehearse=false"


def plan_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "plan.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.feature("B4")
@pytest.mark.slow
def test_rehearsal_of_three_ranks_changes_no_bit(launcher: Launcher, tmp_path: Path) -> None:
    words = (*SMALL, "MACHINE.threads=1", "PHASES.epochs=1")
    for name, word in (("one", REHEARSED), ("other", WITHOUT)):
        done = launcher.run(tmp_path / name, 3, *words, word)
        assert (done.codes, done.alive) == ([0, 0, 0], []), done.outputs
    assert differences_of_runs(tmp_path / "one", tmp_path / "other") == []
    assert plan_of(tmp_path / "one")["rehearsal"]["kinds"][0]["samples"] == 24


@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero", "sharded_ddp"])
def test_rehearsal_under_a_strategy_changes_no_bit(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    words = (
        *SMALL,
        "MACHINE.threads=1",
        "PHASES.epochs=1",
        f"DISTRIBUTED.strategy={strategy}",
        "MODEL.ema={}",
    )
    words = words[:-1] if strategy == "sharded_ddp" else words
    for name, word in (("one", REHEARSED), ("other", WITHOUT)):
        done = launcher.run(tmp_path / name, 3, *words, word)
        assert (done.codes, done.alive) == ([0, 0, 0], []), done.outputs
    ends = [
        (tmp_path / name / "log.txt").read_text().rpartition("sha256 ")[2].split()[0]
        for name in ("one", "other")
    ]
    assert ends[0] == ends[1]
    assert plan_of(tmp_path / "one")["rehearsal"]["checkpoint_bytes"] > 0


def test_mistake_of_every_rank_ends_all_ranks(launcher: Launcher, tmp_path: Path) -> None:
    words = (*SMALL, "MACHINE.threads=1", "LOSS.name=MSELoss", REHEARSED)
    done = launcher.run(tmp_path / "run", 3, *words)
    assert (done.codes, done.alive) == ([2, 2, 2], [])
    assert done.seconds < 30
    assert "LOSS" in done.outputs[0]
    assert not (tmp_path / "run" / "checkpoints").exists()
