"""Ranks check the same update, and a faulty one is named (hook `recheck`)."""

import json
from pathlib import Path

import pytest
from harness import SMALL, differences_of_runs, status
from processes import Launcher

ONE = "MACHINE.threads=1"
EACH = "HOOKS.recheck={every_minutes: 1e-9}"
FAULTY = ("RUN.imports=[recheck_parts]", "HOOKS.disturb={rank: 1, update: 6}")


@pytest.mark.feature("recheck")
def test_rank_whose_gradient_was_wrong_is_named_and_the_resume_is_exact(
    launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = (*SMALL, ONE, EACH, "CHECKPOINT.every_updates=4")
    broken = launcher.run(folder, 3, *words, *FAULTY)
    assert broken.codes == [8, 8, 8]
    found = json.loads((folder / "checkpoints/rechecked.json").read_text())["mismatches"][0]
    assert (found["update"], found["ranks"], found["components"][0]) == (6, [1], "gradient")
    assert launcher.run(folder, 3, *words).codes == [0, 0, 0]
    assert differences_of_runs(unbroken_by_three_ranks, folder) == []
    assert status(folder)["rechecked"]["updates"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("DISTRIBUTED.reduction=ordered",), ("OPTIMIZER.accumulate=2", "MODEL.ema={decay: 0.9}")],
    ids=["ordered", "accumulate-average"],
)
def test_rechecks_on_two_ranks_change_no_bit(
    launcher: Launcher, tmp_path: Path, words: tuple[str, ...]
) -> None:
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    assert launcher.run(plain, 2, *SMALL, ONE, *words).codes == [0, 0]
    assert launcher.run(checked, 2, *SMALL, ONE, *words, EACH).codes == [0, 0]
    assert differences_of_runs(plain, checked) == []
    assert status(checked)["rechecked"]["updates"] >= 3


@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero"])
def test_sharded_runs_are_refused(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    words = (*SMALL, ONE, EACH, f"DISTRIBUTED.strategy={strategy}")
    ended = launcher.run(tmp_path / "run", 2, *words)
    assert ended.codes == [2, 2], ended.outputs
    assert "HOOKS.recheck" in ended.outputs[0]
    assert not (tmp_path / "run/checkpoints").exists()
