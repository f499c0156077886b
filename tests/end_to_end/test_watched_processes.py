"""What watches several processes: the warning of a slow one, and the guard of the order of
collective calls."""

from pathlib import Path

import pytest
from harness import differences_of_runs
from processes import Launcher
from test_faults_processes import DATA, WORDS, strike

STRAGGLERS = "HOOKS.stragglers={every_updates: 5, milliseconds: 20}"


@pytest.mark.addon("observe")
@pytest.mark.serial
class TestStragglers:
    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [2, 0])
    def test_slow_data_is_reported_once_and_changes_no_bit(
        self, launcher: Launcher, tmp_path: Path, rank: int
    ) -> None:
        trouble = tmp_path / f"trouble-{rank}"
        trouble.write_text("wait 0.006")
        slow = launcher.run(tmp_path / "slow", 3, *WORDS, *DATA, STRAGGLERS)
        assert slow.codes == [0] * 3, slow.outputs
        told = [line for line in slow.outputs[0].splitlines() if "slows down all others" in line]
        assert len(told) == 1
        assert f"rank {rank} of world size 3 (" in told[0]
        assert slow.outputs[1] == slow.outputs[2] == ""

        trouble.unlink()
        unbroken = launcher.run(tmp_path / "unbroken", 3, *WORDS, *DATA, "HOOKS.stragglers=null")
        assert unbroken.codes == [0] * 3, unbroken.outputs
        assert differences_of_runs(tmp_path / "slow", tmp_path / "unbroken") == []

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 1])
    def test_slow_forward_pass_is_reported(
        self, launcher: Launcher, tmp_path: Path, rank: int
    ) -> None:
        loss = f"LOSS={{name: struck_loss, rank: {rank}, seconds: 0.05}}"
        done = launcher.run(tmp_path / "run", 3, *WORDS, "PHASES.epochs=1", STRAGGLERS, loss)
        assert done.codes == [0] * 3, done.outputs
        assert f"rank {rank} of world size 3 (" in done.outputs[0]
        assert done.outputs[0].count("slows down all others") == 1

    @pytest.mark.slow
    def test_equally_slow_ranks_are_not_reported(self, launcher: Launcher, tmp_path: Path) -> None:
        for rank in range(3):
            (tmp_path / f"trouble-{rank}").write_text("wait 0.006")
        done = launcher.run(tmp_path / "run", 3, *WORDS, *DATA, "PHASES.epochs=1", STRAGGLERS)
        assert done.codes == [0] * 3, done.outputs
        assert "slows down all others" not in done.outputs[0]


@pytest.mark.addon("observe")
class TestOrder:
    @pytest.mark.feature("71")
    def test_collective_called_by_one_rank_only_is_found_at_once(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        done = launcher.run(
            tmp_path / "run", 3, *WORDS, strike(1, 3, "add"), "DISTRIBUTED.debug=true"
        )
        assert done.codes == [1] * 3, done.outputs
        said = done.outputs[0]
        assert "the ranks do not make the same collective call next" in said
        assert "rank 1: all_reduce SUM of float32 (1,) at " in said
        assert "process_parts.py:" in said
        assert (
            "/phasetrain/"
            in said.partition("collective call next (rank 0: ")[2].partition("rank 1")[0]
        )
        assert done.seconds < 20

    @pytest.mark.slow
    def test_mismatch_is_found_late_or_never_without_the_check(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        words = (strike(1, 3, "add"), "DISTRIBUTED.timeout_seconds=4")
        done = launcher.run(tmp_path / "run", 3, *WORDS, *words)
        assert "collective call" not in done.outputs[0]

    @pytest.mark.slow
    def test_ranks_that_do_not_arrive_are_reported_at_the_timeout(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        words = (
            strike(1, 3, "add", event="batch"),
            "DISTRIBUTED.timeout_seconds=3",
            "DISTRIBUTED.debug=true",
        )
        done = launcher.run(tmp_path / "run", 3, *WORDS, *words)
        assert done.codes == [1] * 3, done.outputs
        assert (
            "DISTRIBUTED.debug: not all 3 ranks have reached the same collective call"
            in done.outputs[0]
        )
        assert "rank 1 waits in all_reduce SUM of float32 (1,) at " in done.outputs[0]
        assert "process_parts.py:" in done.outputs[0]

    @pytest.mark.slow
    def test_check_changes_no_bit(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
    ) -> None:
        done = launcher.run(tmp_path / "run", 3, *WORDS, "DISTRIBUTED.debug=true")
        assert (done.codes, differences_of_runs(unbroken_by_three_ranks, tmp_path / "run")) == (
            [0] * 3,
            [],
        ), done.outputs
