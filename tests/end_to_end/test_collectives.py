"""Collectives between three ranks, and meters that need all rows at once."""

from pathlib import Path

import pytest
from harness import SMALL, newest, records
from processes import Launcher
from test_processes import ONE

CHECKS = "RUN.imports=[collective_checks]"
AUC = (CHECKS, "METERS={exact_auc: {}}", "PHASES.limit.test=null", "DATA.TEST.batch_size=100")


def auc(folder: Path) -> list[dict[str, float]]:
    return [
        record["metrics"]
        for record in records(folder)
        if record["kind"] == "phase" and record["split"] == "test"
    ]


@pytest.mark.feature("76", "collectives for custom parts", "`phasetrain.distributed`")
def test_three_processes_exchange_rows_numbers_and_gradients(
    launcher: Launcher, tmp_path: Path
) -> None:
    ended = launcher.run(
        tmp_path / "run", 3, *SMALL, ONE, CHECKS, "HOOKS.collective_checks={}", "PHASES.epochs=0"
    )
    assert ended.codes == [0, 0, 0], ended.outputs
    assert "".join(ended.outputs).count("said once") == 1


@pytest.mark.feature(
    "74",
    "meters reduced over ranks; tests only on request",
    "`Meter.add_sum`, `Meter.add_rows`, `PHASES.train_meters`",
)
@pytest.mark.by_default(1)
@pytest.mark.parametrize("size", [1, 3])
def test_rows_of_a_meter_are_complete_after_a_kill_in_a_test(
    launcher: Launcher, tmp_path: Path, size: int
) -> None:
    words = (*SMALL, ONE, *AUC, "PHASES.epochs=1", "PHASES.limit.train=1")
    assert launcher.run(tmp_path / "whole", 3, *words).codes == [0, 0, 0]

    folder = tmp_path / "run"
    struck = (
        "HOOKS.die_in_test={}",
        "HOOKS.each={name: phasetrain.testing.SaveEachStep}",
        "CHECKPOINT.background=false",
    )
    assert launcher.run(folder, 3, *words, *struck).codes[0] == -9
    position = newest(folder).manifest.state
    assert (position["phase"], position["step"]) == (1, 1)
    assert launcher.run(folder, size, *words).codes == [0] * size

    whole, resumed = auc(tmp_path / "whole"), auc(folder)
    assert whole[-1]["exact_auc_rows"] == 355
    assert [one["exact_auc_rows"] for one in resumed] == [355]
    if size == 3:
        assert resumed == whole
    assert abs(resumed[0]["exact_auc_value"] - whole[0]["exact_auc_value"]) < 1e-4


@pytest.mark.by_default(1)
@pytest.mark.parametrize("words", [(), ("DISTRIBUTED.reduction=ordered",)])
def test_checks_before_the_start_leave_the_loss_state_unchanged(
    launcher: Launcher, tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = launcher.run(
        tmp_path / "run", 2, *SMALL, ONE, CHECKS, "LOSS.name=counting", "PHASES.epochs=1", *words
    )
    assert ended.codes == [0, 0], ended.outputs
    assert newest(tmp_path / "run").state["task"]["loss"]["count"].item() == 5
