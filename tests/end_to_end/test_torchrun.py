"""Runs under torchrun: started again in place with the same bits, its reports, and the signals that
it passes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import SMALL, differences_of_runs, status
from kill_findings import session
from processes import Launcher, free_port

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ONE = ("MACHINE.threads=1", "RUN.imports=[process_parts]", "CHECKPOINT.every_updates=1")


class Torchrun:
    """A torchrun in a session of its own, which is gone at the end."""

    def __init__(
        self, folder: Path, *words: str, flags: tuple[str, ...] = (), program: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.output = folder, folder.with_name(f"{folder.name}.txt")
        line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", *flags]
        line += [
            *(program or (str(ROOT / "tools/run.py"),)),
            f"RUN.dir={folder}",
            *SMALL,
            *ONE,
            *words,
        ]
        environment = os.environ | {
            "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        with self.output.open("w") as output:
            self._process = subprocess.Popen(
                line,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=folder.parent,
                start_new_session=True,
            )

    def __enter__(self) -> "Torchrun":
        return self

    def __exit__(self, *error: object) -> None:
        for pid in session(self._process.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.wait(30)

    def wait(self, seconds: float = 280.0) -> int:
        """Return its exit code; all of its session have ended."""
        code = self._process.wait(seconds)
        assert session(self._process.pid) == []
        return code

    def until(self, updates: int) -> None:
        """Wait until the run has done so many updates."""
        end = time.monotonic() + 120
        while self.updates() < updates:
            assert self._process.poll() is None, self.told()
            assert time.monotonic() < end, self.told()
            time.sleep(0.05)

    def updates(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"kind": "step"') if path.exists() else 0

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def told(self) -> str:
        return self.output.read_text(errors="replace")


@pytest.fixture(scope="module")
def unbroken(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three processes that met no fault."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    done = launcher.run(folder, 3, *SMALL, *ONE)
    assert done.codes == [0, 0, 0], done.outputs
    return folder


@pytest.mark.slow
def test_rank_killed_under_torchrun_costs_no_bit(unbroken: Path, tmp_path: Path) -> None:
    strike = "HOOKS.strike={rank: 1, update: 7}"
    with Torchrun(tmp_path / "run", strike, flags=("--max-restarts=3",)) as one:
        assert one.wait() == 0, one.told()
    # torchrun may print the exit code of a survivor, if it sees both at once.
    assert (tmp_path / "run.struck-1-7").read_text() == "x"
    assert differences_of_runs(unbroken, tmp_path / "run") == []
    assert status(tmp_path / "run")["attempt"] == 2
    assert status(tmp_path / "run")["state"] == "finished"
    lines = [line for line in one.told().splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert (
        len([line for line in lines if "attempt 1" in line]) == 1
    )  # printed by the main process alone
    assert len([line for line in lines if "completed after 15 updates" in line]) == 1


@pytest.mark.slow
def test_ten_restarts_in_a_row(unbroken: Path, tmp_path: Path) -> None:
    strikes = [f"HOOKS.s{at}={{name: strike, rank: {at % 3}, update: {at}}}" for at in range(2, 12)]
    with Torchrun(tmp_path / "run", *strikes, flags=("--max-restarts=10",)) as one:
        assert one.wait() == 0, one.told()
    assert differences_of_runs(unbroken, tmp_path / "run") == []
    assert status(tmp_path / "run")["attempt"] == 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told", "code"),
    [
        ("raise", "ArithmeticError: struck at update 7", 1),
        ("refuse", "ConfigError: ", 2),
    ],
)
def test_first_error_is_reported_first(tmp_path: Path, how: str, told: str, code: int) -> None:
    with Torchrun(tmp_path / "run", f"HOOKS.strike={{rank: 2, update: 7, how: {how}}}") as one:
        one.until(6)
        began = time.monotonic()
        assert one.wait() == 1  # of torchrun, always
        assert time.monotonic() - began < 20
    printed, _, summary = one.told().partition("Root Cause (first observed failure)")
    assert f"rank 2 of 3 failed first: {told}" in printed
    assert "rank      : 2 (local_rank: 2)" in summary
    assert f"exitcode  : {code} " in summary
    assert told in summary
    assert "PeerError" not in summary
    found = status(tmp_path / "run")
    assert (found["state"], found["exit_code"]) == ("failed", code)
    assert f"rank 2 of 3 failed first: {told}" in found["reason"]


@pytest.mark.slow
def test_an_error_before_the_processes_meet_is_reported(tmp_path: Path) -> None:
    with Torchrun(tmp_path / "run", "LOSS.name=no_such_loss") as one:
        assert one.wait() == 1
    summary = one.told().partition("Root Cause (first observed failure)")[2]
    assert "exitcode  : 2 " in summary
    assert "ConfigError: LOSS.name = 'no_such_loss'" in summary
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sigterm_to_torchrun_saves(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sleep = "HOOKS.strike={rank: 0, update: 4, how: sleep, seconds: 4}"
    with Torchrun(folder, sleep) as one:
        one.until(4)
        one.send(signal.SIGTERM)
        assert one.wait() == 1
    found = status(folder)
    assert (found["state"], found["reason"], found["exit_code"]) == ("preempted", "SIGTERM", 143)
    assert found["updates"] in (4, 5, 6)
    program = ("-m", "phasetrain")  # as good as tools/run.py
    with Torchrun(folder, sleep, program=program) as again:
        assert again.wait() == 0, again.told()
    assert differences_of_runs(unbroken, folder) == []


@pytest.mark.slow
def test_sigusr1_to_torchrun_reaches_the_processes_only_where_it_is_told_to(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sleep = "HOOKS.strike={rank: 0, update: 4, how: sleep, seconds: 3}"
    with Torchrun(
        folder, sleep, flags=("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",)
    ) as one:
        one.until(4)
        one.send(signal.SIGUSR1)
        one.wait()
    assert status(folder)["state"] == "finished"


@pytest.mark.slow
def test_two_torchruns_stand_for_two_machines(unbroken: Path, tmp_path: Path) -> None:
    """Each of them starts a share of the processes; what one has lost both start again."""
    folder = tmp_path / "run"
    flags = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=x",
    )
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        "--max-restarts=3",
        "--local-addr=127.0.0.1",
    ]
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    words = [
        str(ROOT / "tools/run.py"),
        f"RUN.dir={folder}",
        *SMALL,
        *ONE,
        "HOOKS.strike={rank: 2, update: 7}",
    ]
    outputs = [tmp_path / f"{node}.txt" for node in range(2)]
    started = []
    for node, count in enumerate((2, 1)):
        with outputs[node].open("w") as output:
            command = [*line, f"--nproc-per-node={count}", f"--node-rank={node}", *words]
            started.append(
                subprocess.Popen(
                    command, stdout=output, stderr=output, env=environment, start_new_session=True
                )
            )
    try:
        codes = [one.wait(200) for one in started]
    finally:
        for one in started:
            for pid in session(one.pid):
                os.kill(pid, signal.SIGKILL)
            one.wait(30)
    assert codes == [0, 0], [path.read_text() for path in outputs]
    assert differences_of_runs(unbroken, folder) == []
    assert status(folder)["attempt"] == 2


@pytest.mark.slow
def test_srun_step_resumes_exactly_after_a_failure(unbroken: Path, tmp_path: Path) -> None:
    """Three processes that know of each other by the variables of SLURM alone, the second time
    after a failure."""
    folder = tmp_path / "run"
    strike = "HOOKS.strike={rank: 2, update: 7, how: raise}"
    codes, told = _step_of_srun(tmp_path, f"RUN.dir={folder}", strike)
    assert codes == [1, 1, 1]
    assert "rank 2 of 3 failed first: ArithmeticError: struck at update 7" in told[0]
    assert told[1] == ""
    assert "ArithmeticError: struck at update 7" in told[2]
    codes, told = _step_of_srun(tmp_path, f"RUN.dir={folder}", strike)
    assert codes == [0, 0, 0], told
    assert [bool(text) for text in told] == [True, False, False]
    assert differences_of_runs(unbroken, folder) == []


def _step_of_srun(folder: Path, *words: str) -> tuple[list[int], list[str]]:
    shared = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    shared |= {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "OMP_NUM_THREADS": "1",
    }
    started = []
    for rank in range(3):
        own = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}",
        }
        line = [sys.executable, "-m", "phasetrain", *words, *SMALL, *ONE]
        environment = {**os.environ, **shared, **own}
        started.append(
            subprocess.Popen(
                line,
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    told = [one.communicate(timeout=120)[0] for one in started]
    return [one.returncode for one in started], told
