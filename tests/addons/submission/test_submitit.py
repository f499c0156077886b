"""Runs that submit themselves: preempted and put back into the queue with the same bits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty import ONE
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    run_until_killed,
    status,
    train,
)
from kill_findings import session
from processes import Launcher

pytest.importorskip("submitit")

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
WORDS = (*SMALL, "MACHINE.threads=1", "RUN.imports=[process_parts]", "LAUNCH.minutes=5")
SLEEP = "HOOKS.strike={rank: 0, update: 4, how: sleep, seconds: 4}"

# srun as far as submitit uses it: starts the tasks of the job, each with a log of its own, and
# waits for them.
SRUN = """#!/bin/bash
log= ; while [[ $1 == --* ]]; do [[ $1 == --output ]] && { log=$2; shift; }; shift; done
export SLURM_STEP_NUM_TASKS=$SLURM_NTASKS
for ((i = 0; i < SLURM_NTASKS; i++)); do
  to=${log//%j/$SLURM_JOB_ID}
  SLURM_PROCID=$i SLURM_LOCALID=$i "$@" >> "${to//%t/$i}" 2>&1 &
done
failed=0
for pid in $(jobs -p); do wait "$pid" || failed=$?; done
exit $failed
"""
SBATCH = '#!/bin/sh\necho "$1" >> "$0.calls"\necho Submitted batch job 4711\n'
SCONTROL = '#!/bin/sh\necho "$*" >> "$0.calls"\n'


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", **more}


def wait_until(what: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.05)


def updates(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def tasks(leader: int) -> list[int]:
    """Return the processes of submitit's of a session, in the order of their tasks."""
    found = []
    for pid in session(leader):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[1:4] == [b"-u", b"-m", b"submitit.core._submit"]:
            variables = dict(line.partition("=")[::2] for line in _environment(pid))
            found.append(
                (
                    int(
                        variables.get("SUBMITIT_LOCAL_GLOBALID")
                        or variables.get("SLURM_PROCID")
                        or 0
                    ),
                    pid,
                )
            )
    return [pid for _, pid in sorted(found)]


def _environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")


@dataclass
class Submitted:
    """A command that has submitted its run to a local job, in a session of its own."""

    folder: Path
    leader: int
    printed: str

    def preempt(self) -> None:
        """Send all tasks the signal by which submitit hears of a preemption."""
        for pid in tasks(self.leader):
            os.kill(pid, signal.SIGUSR2)

    def log(self, task: int = 0) -> str:
        return "".join(
            path.read_text() for path in (self.folder / "launch").glob(f"*_{task}_log.out")
        )


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Submitted]]:
    """Return the function that submits a run with these words to this machine; its session is gone
    at the end."""
    leaders = []

    def start(*words: str, command: Sequence[str] = ()) -> Submitted:
        folder = tmp_path / "run"
        first = command or [str(ROOT / "tools/run.py"), f"RUN.dir={folder}", *WORDS]
        line = [sys.executable, *first, "LAUNCH.cluster=local", *words]
        with (tmp_path / "printed.txt").open("w") as output:
            process = subprocess.Popen(
                line,
                env=environment(),
                cwd=tmp_path,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        leaders.append(process.pid)
        assert process.wait(120) == 0, (tmp_path / "printed.txt").read_text()
        return Submitted(folder, process.pid, (tmp_path / "printed.txt").read_text())

    yield start
    for leader in leaders:
        for pid in session(leader):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def unbroken(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the function that gives the folder of a run of some processes that met no fault."""
    folder, done = tmp_path_factory.mktemp("unbroken"), {}

    def run(size: int) -> Path:
        if size not in done:
            done[size] = folder / str(size)
            found = launcher.run(done[size], size, *SMALL, "MACHINE.threads=1")
            assert found.codes == [0] * size, found.outputs
        return done[size]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_preempted_local_job_resumes_bit_identically(
    submit: Callable[..., Submitted], unbroken: Callable[[int], Path], size: int
) -> None:
    one = submit(f"LAUNCH.processes={size}", SLEEP)
    assert "submitted as job " in one.printed
    wait_until(lambda: updates(one.folder) >= 4)
    one.preempt()
    wait_until(lambda: not session(one.leader))
    assert "Calling checkpoint method" in one.log()
    assert "Requeued job" in one.log()
    assert "stopped by SIGTERM" in one.log()
    assert "Not checkpointing nor requeuing since I am a slave" in one.log(size - 1) or size == 1
    assert (status(one.folder)["state"], status(one.folder)["attempt"]) == ("finished", 2)
    assert differences_of_runs(unbroken(size), one.folder) == []


def preempt_and_wait(job: Submitted) -> None:
    wait_until(lambda: updates(job.folder) >= 4)
    job.preempt()
    wait_until(lambda: not session(job.leader))
    assert "Requeued job" in job.log()


@pytest.mark.slow
def test_folder_of_a_killed_run_is_resumed_in_a_job(
    submit: Callable[..., Submitted], unbroken: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_until_killed(folder, ONE, hooks={"save": SaveEachStep(), "kill": KillAfter(2)})
    resume = ["-m", "phasetrain", "resume", str(folder)]
    job = submit("RUN.imports=[process_parts]", "LAUNCH.minutes=5", SLEEP, command=resume)
    preempt_and_wait(job)
    assert (status(folder)["state"], status(folder)["attempt"]) == ("finished", 3)
    assert differences_of_runs(unbroken(1), folder) == []


@pytest.mark.slow
def test_job_of_a_restart_starts_over_once(
    submit: Callable[..., Submitted], unbroken: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(folder, ONE, "RUN.seed=1", "PHASES.epochs=1")
    digest = status(folder)["digest"]
    restart = ["-m", "phasetrain", "--restart", f"RUN.dir={folder}", *WORDS]
    preempt_and_wait(submit(SLEEP, command=restart))
    assert (status(folder)["state"], status(folder)["attempt"]) == ("finished", 2)
    assert differences_of_runs(unbroken(1), folder) == []
    assert status(tmp_path / "run.1")["digest"] == digest
    assert not (tmp_path / "run.2").exists()


@pytest.mark.slow
def test_a_task_that_is_killed_leaves_no_training_alone(submit: Callable[..., Submitted]) -> None:
    one = submit(
        "HOOKS.strike={rank: 0, update: 4, how: sleep, seconds: 30}", "DATA.TRAIN.workers=1"
    )
    wait_until(lambda: updates(one.folder) >= 4)
    for pid in tasks(one.leader):
        os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: status(one.folder)["state"] == "preempted", 60
    )  # the kernel has sent it a SIGTERM
    wait_until(lambda: not session(one.leader), 30)


@pytest.mark.slow
def test_a_job_ends_with_the_exit_code_of_its_run(submit: Callable[..., Submitted]) -> None:
    one = submit("RUN.resume=must")
    wait_until(lambda: not session(one.leader))
    assert "RUN.resume = 'must'" in one.log()
    assert "Requeued" not in one.log()


@pytest.mark.slow
def test_a_slurm_job_is_requeued_by_scontrol(
    tmp_path: Path, unbroken: Callable[[int], Path]
) -> None:
    """F10: sbatch, srun and scontrol are small programs here; all else is what a cluster would
    run."""
    commands, folder = tmp_path / "bin", tmp_path / "run"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    own = environment(PATH=f"{commands}{os.pathsep}{os.environ['PATH']}")
    launch = ("LAUNCH.cluster=slurm", "LAUNCH.processes=3", SLEEP)
    line = [sys.executable, str(ROOT / "tools/run.py"), f"RUN.dir={folder}", *WORDS, *launch]
    done = subprocess.run(
        line, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (script,) = (commands / "sbatch.calls").read_text().split()
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "3",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
    }

    def start(restarts: int) -> subprocess.Popen[bytes]:
        attempt = {**own, **job, "SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(["bash", script], env=attempt, cwd=tmp_path, start_new_session=True)

    first = start(0)
    try:
        wait_until(lambda: updates(folder) >= 4)
        for pid in tasks(first.pid):
            os.kill(pid, signal.SIGUSR2)
        assert first.wait(120) != 0  # the main task says so to SLURM
        assert session(first.pid) == []
        assert (commands / "scontrol.calls").read_text() == "requeue 4711\n"
        assert status(folder)["state"] == "preempted"
    finally:
        for pid in session(first.pid):
            os.kill(pid, signal.SIGKILL)
    second = start(1)
    assert second.wait(120) == 0
    assert (status(folder)["state"], status(folder)["attempt"]) == ("finished", 2)
    assert differences_of_runs(unbroken(3), folder) == []
    assert (commands / "scontrol.calls").read_text() == "requeue 4711\n"


@pytest.mark.addon("experiments")
@pytest.mark.slow
@pytest.mark.parametrize("launcher_name", ["submitit_local", "joblib"])
def test_launchers_of_hydra_run_the_jobs_of_a_sweep(tmp_path: Path, launcher_name: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher_name.partition('_')[0]}_launcher")
    short = ("PHASES.epochs=1", "PHASES.limit.train=2", "PHASES.limit.test=1")
    line = [
        sys.executable,
        str(ROOT / "tools/run.py"),
        "-m",
        *short,
        f"hydra/launcher={launcher_name}",
    ]
    line += ["OPTIMIZER.lr=0.1,0.01", "hydra.sweep.dir=out"]
    for earlier in ("", ", 2 of them before this command"):
        done = subprocess.run(
            line,
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"2 runs in out: 2 finished{earlier}\n" in done.stdout
        found = [status(path.parent) for path in tmp_path.glob("out/*/status.json")]
        assert [(one["state"], one["attempt"]) for one in found] == [("finished", 1)] * 2
