"""Faults of one rank: what the other ranks do, and what the next attempt resumes from."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from failing_calls import Fault
from fork_server import ForkServer
from harness import SMALL, differences_of_runs, leftovers, newest, state_after_signal, status
from processes import Finished, Launcher
from raising import raises

from phasetrain.checkpoint import Checkpointer
from phasetrain.errors import InvalidCheckpointError
from phasetrain.runtime.storage import Storage

WORDS = (*SMALL, "MACHINE.threads=1", "RUN.imports=[process_parts]")
DATA = ("DATA.TRAIN.dataset=uneven", "DATA.TEST.dataset=uneven")
WITHIN_SECONDS = 2.0
"""How long ranks may outlive a killed one."""


def strike(rank: int, update: int, how: str = "kill", **more: object) -> str:
    """Return the override of a hook that causes a fault on a rank after an update."""
    options = "".join(f", {name}: {value}" for name, value in more.items())
    return f"HOOKS.strike={{rank: {rank}, update: {update}, how: {how}{options}}}"


def is_clean(done: Finished, folder: Path) -> bool:
    """Assert that no process and no temporary file is left."""
    assert (done.alive, leftovers(folder)) == ([], [])
    return True


class TestSignals:
    @pytest.mark.feature("77")
    @pytest.mark.parametrize(
        ("rank", "how", "event", "split", "update"),
        [
            (1, "term", "batch", "train", 7),
            pytest.param(2, "int", "step", "train", 7, marks=pytest.mark.slow),
            pytest.param(0, "term", "batch", "test", 5, marks=pytest.mark.slow),
            pytest.param(-1, "term", "batch", "train", 7, marks=pytest.mark.slow),
            pytest.param(2, "term", "phase_end", "train", 5, marks=pytest.mark.slow),
        ],
    )
    def test_signal_to_one_rank_stops_all_at_the_same_step_with_a_save(
        self,
        launcher: Launcher,
        unbroken_by_three_ranks: Path,
        tmp_path: Path,
        rank: int,
        how: str,
        event: str,
        split: str,
        update: int,
    ) -> None:
        folder = tmp_path / "run"
        words = (
            *WORDS,
            strike(rank, update, how, event=event, split=split),
            "CHECKPOINT.every_epochs=null",
        )
        code = 143 if how == "term" else 130
        first = launcher.run(folder, 3, *words)
        assert first.codes == [code] * 3, first.outputs
        assert is_clean(first, folder)
        assert (status(folder)["state"], status(folder)["exit_code"]) == (
            state_after_signal(code - 128),
            code,
        )
        assert [path.name for path in (folder / "checkpoints").glob("p*")] != []
        second = launcher.run(folder, 3, *words)
        assert (second.codes, differences_of_runs(unbroken_by_three_ranks, folder)) == ([0] * 3, [])

    @pytest.mark.slow
    def test_sigusr1_to_another_rank_saves_and_training_continues(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        words = (
            "CHECKPOINT.every_epochs=null",
            "CHECKPOINT.at_end=false",
            "CHECKPOINT.background=false",
        )
        assert launcher.run(folder, 3, *WORDS, strike(2, 7, "usr1"), *words).codes == [0] * 3
        assert len(list((folder / "checkpoints").glob("p*"))) == 1
        assert launcher.run(folder, 3, *WORDS, strike(2, 7, "usr1")).codes == [0] * 3
        assert differences_of_runs(unbroken_by_three_ranks, folder) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [1, 0])
    def test_second_signal_ends_all_ranks_at_once(
        self, launcher: Launcher, tmp_path: Path, rank: int
    ) -> None:
        folder = tmp_path / "run"
        done = launcher.run(folder, 3, *WORDS, strike(rank, 7, "twice", event="batch"))
        assert done.codes == [143] * 3, done.outputs
        assert is_clean(done, folder)
        assert (status(folder)["state"], status(folder)["exit_code"]) == ("preempted", 143)
        assert status(folder)["updates"] == 7

    @pytest.mark.slow
    def test_ranks_leave_without_checkpoint_before_the_first_step(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        (tmp_path / "trouble-2").write_text("marked 0.05")
        pids = launcher.start(folder, 3, *WORDS, *DATA)
        wait_for(tmp_path / "reading")  # the pass that goes before all steps
        os.kill(pids[2], signal.SIGTERM)
        done = launcher.wait(30)
        assert done.codes == [143] * 3, done.outputs
        assert is_clean(done, folder)
        assert (status(folder)["state"], status(folder)["reason"]) == ("preempted", "SIGTERM")
        assert status(folder)["updates"] in (0, 1, 2)

    @pytest.mark.slow
    def test_signal_to_a_rank_that_waits_for_workers_stops_all(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        (tmp_path / "trouble-1").write_text("marked 0.1")
        pids = launcher.start(
            folder, 3, *WORDS, *DATA, "DATA.TRAIN.workers=1", "DATA.TRAIN.prefetch=1"
        )
        wait_for(tmp_path / "reading")
        time.sleep(2.0)
        os.kill(pids[1], signal.SIGTERM)
        done = launcher.wait(60)
        assert done.codes == [143] * 3, done.outputs
        assert is_clean(done, folder)

    @pytest.mark.slow
    def test_signal_to_the_process_groups_stops_all(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        (tmp_path / "trouble-1").write_text("marked 0.02")
        pids = launcher.start(
            folder, 3, *WORDS, *DATA, "DATA.TRAIN.workers=1", "DATA.TRAIN.prefetch=1"
        )
        wait_for(tmp_path / "reading")
        time.sleep(1.0)
        for pid in pids:
            os.killpg(pid, signal.SIGTERM)
        done = launcher.wait(60)
        assert done.codes == [143] * 3, done.outputs
        assert is_clean(done, folder)

    @pytest.mark.slow
    def test_too_little_grace_for_another_save_is_too_little_on_all(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        words = (
            "CHECKPOINT.every_updates=4",
            "CHECKPOINT.grace_seconds=1.0e-6",
            "CHECKPOINT.every_epochs=null",
        )
        done = launcher.run(folder, 3, *WORDS, strike(2, 7, "term", event="batch"), *words)
        assert done.codes == [143] * 3, done.outputs
        assert newest(folder).manifest.state["updates"] == 8


class TestKilled:
    @pytest.mark.parametrize(
        ("rank", "event", "split", "update"),
        [
            (1, "batch", "train", 7),
            pytest.param(0, "batch", "test", 5, marks=pytest.mark.slow),
            pytest.param(0, "batch", "train", 7, marks=pytest.mark.slow),
            pytest.param(2, "batch", "test", 10, marks=pytest.mark.slow),
            pytest.param(2, "save", "train", 10, marks=pytest.mark.slow),
            pytest.param(1, "start", "train", 0, marks=pytest.mark.slow),
        ],
    )
    def test_other_ranks_end_within_two_seconds_and_name_the_killed_one(
        self, launcher: Launcher, tmp_path: Path, rank: int, event: str, split: str, update: int
    ) -> None:
        folder = tmp_path / "run"
        done = launcher.run(folder, 3, *WORDS, strike(rank, update, event=event, split=split))
        others = [one for one in range(3) if one != rank]
        assert done.codes[rank] == -signal.SIGKILL
        assert [done.codes[one] for one in others] == [1, 1], done.outputs
        assert max(done.ends[one] - done.ends[rank] for one in others) < WITHIN_SECONDS
        assert done.alive == []
        teller = 0 if rank else 1  # if rank 0 is gone, rank 1 reports it
        named = (f"rank {rank} of 3 (pid ", f"one or more of the ranks {rank}, ")
        assert any(name in done.outputs[teller] for name in named[: 2 - bool(rank)])
        if rank:
            assert status(folder)["state"] == "failed"

    @pytest.mark.slow
    def test_rank_0_killed_while_it_writes_a_checkpoint(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        words = (*WORDS, "CHECKPOINT.every_updates=1", strike(0, 9, event="save"))
        done = launcher.run(folder, 3, *words)
        assert done.codes == [-signal.SIGKILL, 1, 1], done.outputs
        assert max(done.ends) - done.ends[0] < WITHIN_SECONDS
        assert launcher.run(folder, 3, *words).codes == [0] * 3
        assert differences_of_runs(unbroken_by_three_ranks, folder) == []
        assert leftovers(folder) == []


class TestStoppedAndSlow:
    @pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
    def test_stopped_rank_is_named_at_the_timeout(
        self, launcher: Launcher, tmp_path: Path, rank: int
    ) -> None:
        folder = tmp_path / "run"
        words = (strike(rank, 3, "stop", event="batch"), "DISTRIBUTED.timeout_seconds=3")
        pids = launcher.start(folder, 3, *WORDS, *words)
        others = [pids[one] for one in range(3) if one != rank]
        end = time.monotonic() + 30.0
        while any(Path(f"/proc/{pid}").exists() for pid in others) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(pids[rank], signal.SIGKILL)
        done = launcher.wait(30)
        assert [done.codes[one] for one in range(3) if one != rank] == [1, 1], done.outputs
        assert max(done.ends[one] for one in range(3) if one != rank) < 12.0
        if rank:
            assert f"rank {rank} of 3 (pid {pids[rank]}" in done.outputs[0]
            assert "SIGSTOP" in done.outputs[0]

    @pytest.mark.slow
    def test_slow_rank_is_no_failure_below_the_timeout(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        words = (strike(1, 3, "sleep", seconds=2.0), "DISTRIBUTED.timeout_seconds=4")
        assert launcher.run(folder, 3, *WORDS, *words).codes == [0] * 3
        assert differences_of_runs(unbroken_by_three_ranks, folder) == []


class TestNumerics:
    def test_nan_loss_on_one_rank_stops_all_before_the_update(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        loss = "LOSS={name: struck_loss, rank: 1, call: 6, how: spoil}"
        done = launcher.run(folder, 3, *WORDS, loss, "CHECKPOINT.every_updates=1")
        assert done.codes == [1] * 3, done.outputs
        assert "NumericsError" in status(folder)["reason"]
        assert is_clean(done, folder)
        model = newest(folder).state["task"]["model"]
        assert all(bool(tensor.isfinite().all()) for tensor in model.values())

    @pytest.mark.slow
    def test_nan_loss_on_one_rank_is_skipped_on_all(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        words = (
            "LOSS={name: struck_loss, rank: 1, call: 6, how: spoil}",
            "OPTIMIZER.on_nonfinite=skip",
        )
        done = launcher.run(folder, 3, *WORDS, *words)
        assert done.codes == [0] * 3, done.outputs
        loaded = newest(folder)
        assert loaded.state["task"]["updater"]["skipped"] == 1
        assert all(
            bool(tensor.isfinite().all()) for tensor in loaded.state["task"]["model"].values()
        )


class TestFailing:
    @pytest.mark.parametrize(
        ("words", "told", "code"),
        [
            ([strike(1, 7, "raise", event="batch")], "ArithmeticError: struck at update 7", 1),
            pytest.param(
                [strike(1, 7, "refuse", event="step")],
                "struck at update 7",
                2,
                marks=pytest.mark.slow,
            ),
            pytest.param(
                [strike(2, 5, "raise", event="phase_end")],
                "struck at update 5",
                1,
                marks=pytest.mark.slow,
            ),
            pytest.param(
                [strike(1, 5, "raise", event="save")],
                "struck at update 5",
                1,
                marks=pytest.mark.slow,
            ),
            pytest.param(
                ["LOSS={name: struck_loss, rank: 1, call: 5}"],
                "struck at call 5",
                1,
                marks=pytest.mark.slow,
            ),
            pytest.param(
                ["METERS.struck_meter={rank: 2, call: 5}"],
                "struck at call 5",
                1,
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_all_ranks_end_with_the_error_of_one(
        self, launcher: Launcher, tmp_path: Path, words: list[str], told: str, code: int
    ) -> None:
        folder = tmp_path / "run"
        done = launcher.run(folder, 3, *WORDS, *words)
        assert done.codes == [code] * 3, done.outputs
        assert re.search(rf"rank [12] of 3 .*{told}", done.outputs[0])
        assert is_clean(done, folder)
        assert (status(folder)["state"], status(folder)["exit_code"]) == ("failed", code)
        assert told in status(folder)["reason"]
        assert (
            sum(
                told in (folder / name).read_text()
                for name in ("log.txt", "log-1.txt", "log-2.txt")
            )
            == 3
        )
        assert max(done.ends) - min(done.ends) < WITHIN_SECONDS

    def test_other_ranks_have_the_exit_code_of_rank_0(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        done = launcher.run(tmp_path / "run", 3, *WORDS, strike(0, 7, "refuse"))
        assert done.codes == [2] * 3, done.outputs
        assert "struck at update 7" in done.outputs[0]
        assert is_clean(done, tmp_path / "run")

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [0, 1])
    def test_sample_that_one_rank_cannot_read_ends_all(
        self, launcher: Launcher, tmp_path: Path, workers: int
    ) -> None:
        (tmp_path / "trouble-2").write_text("raise 50")
        words = (*WORDS, *DATA, f"DATA.TRAIN.workers={workers}", "PHASES.limit.train=null")
        done = launcher.run(tmp_path / "run", 3, *words)
        assert done.codes == [1] * 3, done.outputs
        assert re.search("rank 2 of 3 .*SampleError", done.outputs[0])
        assert is_clean(done, tmp_path / "run")


class TestData:
    @pytest.mark.parametrize(
        ("what", "told"),
        [
            ("shorter 10", "DATA.TRAIN: .* 1442 .* 1432 "),
            pytest.param("other 1", "DATA.TRAIN: ", marks=pytest.mark.slow),
            pytest.param("refuse 0", "rank 2 of 3 .*ConfigError", marks=pytest.mark.slow),
        ],
    )
    def test_differing_data_is_rejected_before_the_first_step(
        self, launcher: Launcher, tmp_path: Path, what: str, told: str
    ) -> None:
        (tmp_path / "trouble-2").write_text(what)
        done = launcher.run(tmp_path / "run", 3, *WORDS, *DATA)
        assert done.codes == [2] * 3, done.outputs
        assert re.search(told, done.outputs[0])
        assert not (tmp_path / "run").exists()
        assert done.alive == []


class TestTheFolder:
    @pytest.mark.slow
    def test_second_run_in_one_folder_is_rejected(self, launcher: Launcher, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        (tmp_path / "trouble-0").write_text("marked 0.05")
        with ForkServer(tmp_path) as server:
            other = Launcher(server)
            # The first run would be over before the server had imported torch.
            assert other.run(tmp_path / "warm_up", 1, *WORDS, "PHASES.epochs=0").codes == [0]
            launcher.start(folder, 3, *WORDS, *DATA)
            wait_for(tmp_path / "reading")
            second = other.run(folder, 2, *WORDS, *DATA, MASTER_ADDR="127.0.0.1")
            first = launcher.wait()
        assert second.codes == [4, 4], second.outputs
        assert first.codes == [0] * 3, first.outputs

    @pytest.mark.slow
    def test_rank_0_killed_within_a_commit_loses_no_checkpoint(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
    ) -> None:
        if not launcher.faults:
            pytest.skip("needs gcc")
        words = (*WORDS, "CHECKPOINT.every_updates=2", "CHECKPOINT.keep_last=2")
        calls = [
            (call, at)
            for call in ("open", "write", "fsync", "rename", "mkdir")
            for at in (1, 5, 9, 14)
        ]
        struck = 0
        for number, (call, at) in enumerate([*calls, ("unlink", 2)]):
            folder = tmp_path / f"run{number}"
            killed = Fault(call, f"run{number}/checkpoints", "KILL", first=at, last=at)
            done = launcher.run(folder, 3, *words, faults={0: killed})
            assert done.codes in ([-signal.SIGKILL, 1, 1], [0] * 3), (call, at, done.outputs)
            struck += done.codes[0] != 0
            assert launcher.run(folder, 3, *words).codes == [0] * 3, (call, at)
            assert (differences_of_runs(unbroken_by_three_ranks, folder), leftovers(folder)) == (
                [],
                [],
            ), (call, at)
        assert struck > 12

    def test_checkpoint_that_one_rank_never_sees_fails_the_resume(self, tmp_path: Path) -> None:
        checkpointer = Checkpointer(str(tmp_path), Storage())
        with raises(InvalidCheckpointError, code="checkpoint.not_visible"):
            checkpointer.load_when_visible(f"{tmp_path}/p0001", patience_seconds=0.3)

    @pytest.mark.slow
    def test_checkpoint_that_another_rank_sees_late_is_waited_for(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
    ) -> None:
        if not launcher.faults:
            pytest.skip("needs gcc")
        folder = tmp_path / "run"
        late = Fault("look", "run/checkpoints", "ENOENT", last=6)
        assert launcher.run(folder, 3, *WORDS, strike(2, 7, "term")).codes == [143] * 3
        began = time.monotonic()
        done = launcher.run(folder, 3, *WORDS, faults={1: late})
        assert done.codes == [0] * 3, done.outputs
        assert time.monotonic() - began > 1.0
        assert differences_of_runs(unbroken_by_three_ranks, folder) == []


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + 30.0
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written in time"
        time.sleep(0.01)
