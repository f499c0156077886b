"""Signals at any moment of a run, to the process and to its group; workers that die or hang; a full
/dev/shm."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from failing_calls import Fault
from faulty import ONE, Starter
from harness import SMALL, differences_of_runs, is_clean, newest, state_after_signal, status, train

WORDS = (*SMALL, ONE, "RUN.imports=[faulty_parts]")
TROUBLED = (
    *WORDS,
    "DATA.TRAIN.dataset=troubled",
    "DATA.TRAIN.batch_size=72",
    "PHASES.limit.train=null",
    "PHASES.epochs=1",
)
"""A pass over all data in 20 updates; one sample may hang or kill."""

MOMENTS = {
    "the hooks are made": ("event: made", 0),
    "the start": ("event: on_start", 1),
    "the start of a phase": ("event: on_phase_start, updates: 5, split: test", 6),
    "a train step": ("event: on_forward, updates: 6, split: train", 7),
    "the end of a train step": ("event: on_step, updates: 7", 7),
    "a test step": ("event: on_forward, updates: 5, split: test", 5),
    "a save": ("event: on_save, updates: 5", 5),
    "the end of a train phase": ("event: on_phase_end, updates: 5, split: train", 5),
    "the end of a test phase": ("event: on_phase_end, updates: 5, split: test", 6),
}
"""Moment of the signal -> its event, and the number of completed updates after the stop."""


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.02)


def fault(what: str, number: int = signal.SIGTERM, *, group: bool = True, times: int = 1) -> str:
    """Return the override of a hook that sends a signal."""
    return (
        f"HOOKS.fault={{name: fault_at, {what}, number: {number}, group: {group}, times: {times}}}"
    )


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run over all data without trouble."""
    folder = tmp_path_factory.mktemp("troubled")
    assert train(folder, *TROUBLED).state == "finished"
    return folder


class TestAStop:
    @pytest.mark.by_default("a train step-15-2")
    @pytest.mark.parametrize(
        ("number", "workers"),
        [
            (signal.SIGTERM, 2),
            *(pytest.param(signal.SIGINT, n, marks=pytest.mark.slow) for n in (0, 1)),
        ],
    )
    @pytest.mark.parametrize("moment", MOMENTS)
    def test_signal_to_the_process_group_saves_and_resumes_exactly(
        self,
        starter: Starter,
        unbroken: Path,
        tmp_path: Path,
        moment: str,
        number: int,
        workers: int,
    ) -> None:
        folder, (event, updates) = tmp_path / "run", MOMENTS[moment]
        ended = starter.run(folder, *WORDS, f"DATA.TRAIN.workers={workers}", fault(event, number))
        assert ended.code == 128 + number, ended.output
        name = signal.Signals(number).name
        assert f"{name} at update {status(folder)['updates']} of 15" in ended.output
        assert "exited unexpectedly" not in ended.output  # torch's complaint about its workers
        assert "Traceback" not in ended.output
        told = status(folder)
        assert (told["state"], told["exit_code"], told["reason"]) == (
            state_after_signal(number),
            128 + number,
            name,
        )
        # A signal that arrives while the run waits for a batch stops it before that step.
        assert updates - 1 <= told["updates"] <= updates
        assert is_clean(ended, folder)
        if told["updates"]:
            assert newest(folder).manifest.state["updates"] == told["updates"]
        again = starter.run(folder, *WORDS)
        assert again.code == 0, again.output
        assert differences_of_runs(unbroken, folder) == []

    def test_signal_while_data_is_built_leaves_no_checkpoint(
        self, starter: Starter, troubled: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "trouble").write_text(f"signal {signal.SIGTERM:d}")
        folder = tmp_path / "run"
        ended = starter.run(folder, *TROUBLED)
        assert ended.code == 143, ended.output
        assert (status(folder)["state"], status(folder)["updates"]) == ("preempted", 0)
        assert not (folder / "checkpoints").exists()
        assert is_clean(ended, folder)
        (tmp_path / "trouble").unlink()
        assert starter.run(folder, *TROUBLED).code == 0
        assert differences_of_runs(troubled, folder) == []

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
    )
    def test_signal_before_the_config_is_read_writes_nothing(
        self, starter: Starter, tmp_path: Path, number: int, code: int
    ) -> None:
        """The default action of the signal ends the process; nothing has been written."""
        (tmp_path / f"at_import_{number:d}.py").write_text(
            f"import os\nos.kill(os.getpid(), {number:d})\n"
        )
        ended = starter.run(tmp_path / "run", *SMALL, ONE, f"RUN.imports=[at_import_{number:d}]")
        assert ended.code == code
        assert not (tmp_path / "run").exists()

    def test_signal_at_the_end_changes_nothing(
        self, starter: Starter, unbroken: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        ended = starter.run(folder, *WORDS, fault("event: on_end"))
        assert ended.code == 0, ended.output
        assert status(folder)["state"] == "finished"
        assert is_clean(ended, folder)
        assert differences_of_runs(unbroken, folder) == []

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("moment", ["a train step", "a test step", "a save"])
    @pytest.mark.parametrize(
        "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
    )
    def test_second_signal_ends_the_run_at_once(
        self, starter: Starter, unbroken: Path, tmp_path: Path, moment: str, number: int
    ) -> None:
        folder = tmp_path / "run"
        words = ("DATA.TRAIN.workers=2", "CHECKPOINT.every_updates=2")
        ended = starter.run(folder, *WORDS, *words, fault(MOMENTS[moment][0], number, times=2))
        assert ended.code == 128 + number, ended.output
        ending = (state_after_signal(number), 128 + number)
        assert (status(folder)["state"], status(folder)["exit_code"]) == ending
        assert is_clean(ended, folder)
        assert starter.run(folder, *WORDS).code == 0
        assert differences_of_runs(unbroken, folder) == []


class TestASaveUnderWay:
    """Each fsync of a checkpoint is slow: the save of update 2 is still running at update 3."""

    WORDS = (*WORDS, "CHECKPOINT.every_updates=2", "DATA.TRAIN.workers=1")
    AT = "event: on_forward, updates: 2, split: train"

    @pytest.fixture
    def slow(self, starter: Starter) -> tuple[Fault, ...]:
        if not starter.faults:
            pytest.skip("slow system calls need a library that gcc compiles, and there is no gcc")
        return (Fault("fsync", "/checkpoints/", milliseconds=150),)

    def test_stop_waits_for_the_save_under_way(
        self, starter: Starter, unbroken: Path, tmp_path: Path, slow: tuple[Fault, ...]
    ) -> None:
        folder = tmp_path / "run"
        ended = starter.run(folder, *self.WORDS, fault(self.AT), faults=slow)
        assert ended.code == 143, ended.output
        names = sorted(path.name for path in (folder / "checkpoints").glob("p*"))
        assert names == ["p0000-s00000002", "p0000-s00000003"]
        assert is_clean(ended, folder)
        assert starter.run(folder, *self.WORDS).code == 0
        assert differences_of_runs(unbroken, folder) == []

    def test_second_signal_gives_up_the_save(
        self, starter: Starter, unbroken: Path, tmp_path: Path, slow: tuple[Fault, ...]
    ) -> None:
        folder = tmp_path / "run"
        ended = starter.run(folder, *self.WORDS, fault(self.AT, times=2), faults=slow)
        assert ended.code == 143, ended.output
        assert list((folder / "checkpoints").iterdir()) == []
        assert is_clean(ended, folder)
        assert starter.run(folder, *self.WORDS).code == 0
        assert differences_of_runs(unbroken, folder) == []

    @pytest.mark.slow
    def test_save_at_the_end_is_skipped_if_grace_is_too_short(
        self, starter: Starter, unbroken: Path, tmp_path: Path, slow: tuple[Fault, ...]
    ) -> None:
        folder = tmp_path / "run"
        at = "event: on_forward, updates: 6, split: train"
        ended = starter.run(
            folder, *self.WORDS, "CHECKPOINT.grace_seconds=0.3", fault(at), faults=slow
        )
        assert ended.code == 143, ended.output
        assert status(folder)["updates"] == 7
        assert newest(folder).manifest.state["updates"] == 6
        assert is_clean(ended, folder)
        assert starter.run(folder, *self.WORDS).code == 0
        assert differences_of_runs(unbroken, folder) == []


class TestWhatDoesNotStop:
    @pytest.mark.by_default("10-a train step", "12-a test step")
    @pytest.mark.parametrize(
        "moment",
        [
            "a train step",
            "a test step",
            *(pytest.param(m, marks=pytest.mark.slow) for m in ("the start", "a save")),
        ],
    )
    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
    def test_user_signal_to_the_process_group_does_not_stop_the_run(
        self, starter: Starter, unbroken: Path, tmp_path: Path, moment: str, number: int
    ) -> None:
        folder = tmp_path / "run"
        words = ("DATA.TRAIN.workers=2", "CHECKPOINT.every_epochs=null", "CHECKPOINT.keep_last=9")
        ended = starter.run(folder, *WORDS, *words, fault(MOMENTS[moment][0], number))
        assert ended.code == 0, ended.output
        saved = sorted(path.name for path in (folder / "checkpoints").glob("p*"))
        asked = {
            "the start": "p0000-s00000001",
            "a train step": "p0002-s00000002",
            "a test step": "p0001-s00000001",
        }
        at = [asked[moment]] if number == signal.SIGUSR1 and moment in asked else []
        assert saved == [*at, "p0006-s00000000"]
        assert (folder / "stacks.txt").exists() == (number == signal.SIGUSR2)
        if number == signal.SIGUSR2:
            assert "run_phase" in (folder / "stacks.txt").read_text() or moment == "the start"
        assert is_clean(ended, folder)
        assert differences_of_runs(unbroken, folder) == []

    @pytest.mark.slow
    def test_user_signal_before_torch_is_imported_does_not_kill(self, tmp_path: Path) -> None:
        """Signals that a run handles later do not kill a process that is starting."""
        sends = "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nos.kill(os.getpid(), signal.SIGUSR2)\n"
        (tmp_path / "sends.py").write_text(sends)
        words = [*SMALL, ONE, f"RUN.dir={tmp_path}/run", "RUN.imports=[sends]", "PHASES.epochs=0"]
        command = [sys.executable, "-m", "phasetrain", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr


# The main process is slow to accept the connection of a worker that passes a tensor to it.
SLOW_HANDLES = """
import os, socket, time
from multiprocessing import connection

MAIN = os.getpid()


def connected(address):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(address)
        time.sleep(0.01 * (os.getpid() == MAIN))
        return connection.Connection(one.detach())


connection.SocketClient = connected
"""


ONE_WORKER = "DATA.TRAIN.workers=1"
"""A second worker would outlive the main process by up to 5 s, and the test waits for it."""


class TestWorkers:
    WORDS = (*TROUBLED, "DATA.TRAIN.workers=2")

    @pytest.mark.parametrize(
        ("trouble", "words"),
        [
            ("kill 200", ()),
            pytest.param("hang 200", ("DATA.TRAIN.timeout_seconds=1.5",), marks=pytest.mark.slow),
        ],
    )
    def test_dead_or_hanging_worker_ends_the_run_with_a_save(
        self, starter: Starter, troubled: Path, tmp_path: Path, trouble: str, words: tuple[str, ...]
    ) -> None:
        (tmp_path / "trouble").write_text(trouble)
        folder = tmp_path / "run"
        ended = starter.run(folder, *self.WORDS, *words)
        assert ended.code == 1, ended.output
        assert "DATA.TRAIN: " in ended.output
        assert "Traceback" not in ended.output
        told = status(folder)
        assert (told["state"], told["exit_code"]) == ("failed", 1)
        assert "DATA.TRAIN" in told["reason"]
        last = newest(folder).manifest
        assert last.facts.why == "exception"
        assert 0 < last.state["updates"] == told["updates"] < 20
        assert is_clean(ended, folder)
        (tmp_path / "trouble").unlink()
        again = starter.run(folder, *TROUBLED)
        assert again.code == 0, again.output
        assert differences_of_runs(troubled, folder) == []

    @pytest.mark.slow
    def test_worker_that_dies_during_a_handover_is_reported_without_another_traceback(
        self, starter: Starter, tmp_path: Path
    ) -> None:
        (tmp_path / "trouble").write_text("kill 200")
        (tmp_path / "slow_handles.py").write_text(SLOW_HANDLES)
        ended = starter.run(
            tmp_path / "run", *self.WORDS, "RUN.imports=[faulty_parts, slow_handles]"
        )
        assert ended.code == 1, ended.output
        assert "DATA.TRAIN: " in ended.output
        assert "Traceback" not in ended.output
        assert newest(tmp_path / "run").manifest.facts.why == "exception"
        assert is_clean(ended, tmp_path / "run")

    @pytest.mark.slow
    def test_worker_that_dies_in_a_step_is_reported_in_the_next_wait(
        self, starter: Starter, troubled: Path, tmp_path: Path
    ) -> None:
        """Torch raises at any line of the main thread; within an update nothing exact could be
        saved."""
        folder = tmp_path / "run"
        at = "event: on_forward, updates: 6, do: kill_workers, seconds: 0.3"
        ended = starter.run(folder, *TROUBLED, ONE_WORKER, f"HOOKS.fault={{name: fault_at, {at}}}")
        assert ended.code == 1, ended.output
        assert "DATA.TRAIN: " in ended.output
        assert "Traceback" not in ended.output
        last = newest(folder).manifest
        assert (last.facts.why, last.state["updates"] > 6) == ("exception", True)
        assert is_clean(ended, folder)
        assert starter.run(folder, *TROUBLED).code == 0
        assert differences_of_runs(troubled, folder) == []

    @pytest.mark.slow
    def test_without_a_save_on_an_exception_the_epoch_is_lost(
        self, starter: Starter, troubled: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "trouble").write_text("kill 200")
        folder = tmp_path / "run"
        assert starter.run(folder, *TROUBLED, ONE_WORKER, "CHECKPOINT.on_exception=false").code == 1
        assert not (folder / "checkpoints").exists()
        (tmp_path / "trouble").unlink()
        assert starter.run(folder, *TROUBLED).code == 0
        assert differences_of_runs(troubled, folder) == []

    @pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_signal_to_the_group_while_a_worker_hangs(
        self, starter: Starter, troubled: Path, tmp_path: Path, signals: int
    ) -> None:
        (tmp_path / "trouble").write_text("hang 200")
        folder = tmp_path / "run"
        pid = starter.start(folder, *TROUBLED, ONE_WORKER)
        wait_until((tmp_path / "met").exists)
        time.sleep(0.5)  # until the prefetched batches are used up
        for _ in range(signals):
            os.killpg(pid, signal.SIGTERM)
            time.sleep(
                0.15
            )  # sooner another one would be the same request to the main process, and not to the workers
        ended = starter.wait()
        assert ended.code == 143, ended.output
        assert status(folder)["state"] == "preempted"
        assert is_clean(ended, folder)
        (tmp_path / "trouble").unlink()
        assert starter.run(folder, *TROUBLED).code == 0
        assert differences_of_runs(troubled, folder) == []


@pytest.mark.by_default(1)
@pytest.mark.parametrize("size", ["64k", "4k"])
def test_full_shared_memory_is_reported_and_leaves_no_segment(
    starter: Starter, tmp_path: Path, size: str
) -> None:
    """The run has its own mount namespace with a tiny /dev/shm."""
    words = (*SMALL, ONE, "DATA.TRAIN.workers=2", "DATA.TRAIN.batch_size=600")
    folder = tmp_path / "run"
    ended = starter.run(folder, *words, "PHASES.limit.train=2", shared_memory=size)
    if "this user may not mount" in ended.output:
        pytest.skip("this user may not mount a small /dev/shm")
    assert ended.code == 1, ended.output
    assert os.strerror(errno.ENOSPC) in ended.output
    assert "DATA.TRAIN" in status(folder)["reason"]
    assert "DATA.TRAIN.workers=0" in status(folder)["reason"]
    assert "left in /dev/shm: []" in ended.output
    assert is_clean(ended, folder)
