"""Runs of several processes end with the same bits after any rank was killed."""

from pathlib import Path

import pytest
from harness import SMALL, differences_of_runs, status
from processes import Launcher

ONE = "MACHINE.threads=1"
STRIKE = "RUN.imports=[process_parts]"


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("rank", "update"), [(0, 7), (1, 8), (2, 3)])
def test_run_is_bit_identical_after_one_rank_is_killed(
    launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path, rank: int, update: int
) -> None:
    folder = tmp_path / "run"
    words = (
        *SMALL,
        ONE,
        STRIKE,
        f"HOOKS.strike={{rank: {rank}, update: {update}}}",
        "CHECKPOINT.every_updates=2",
    )

    broken = launcher.run(folder, 3, *words)

    assert broken.codes[rank] == -9
    assert [code for at, code in enumerate(broken.codes) if at != rank] == [1, 1]
    assert broken.seconds < 30
    assert launcher.run(folder, 3, *words).codes == [0, 0, 0]
    assert differences_of_runs(unbroken_by_three_ranks, folder) == []
    assert status(folder)["state"] == "finished"
