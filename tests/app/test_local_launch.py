"""Ranks that LAUNCH.processes starts on this machine."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import SMALL, differences_of_runs, status
from raising import raises
from torch import nn
from torch.utils.data import TensorDataset

from phasetrain import fit
from phasetrain.app.api import run
from phasetrain.app.engines import RanksNeededError, run_engine
from phasetrain.app.local_launch import launch_processes
from phasetrain.app.setup import resolve_config
from phasetrain.app.train.run_documents import format_command, format_resume
from phasetrain.distributed import Placement
from phasetrain.errors import ConfigError
from phasetrain.runtime.terminal import Terminal

RANK = "import os, sys, time, signal; rank = int(os.environ['RANK']); "


def launch(code: str, size: int = 2) -> int:
    return launch_processes(size, (), (sys.executable, "-c", RANK + code))


class TestExitCode:
    def test_success_of_all(self, tmp_path: Path) -> None:
        names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS'"
        code = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str([os.environ[n] for n in [{names}]]))"
        assert launch(code, 3) == 0
        found = {path.name: path.read_text() for path in tmp_path.iterdir()}
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        assert found == {
            rank: f"['{rank}', '{rank}', '3', '127.0.0.1', '{threads}']" for rank in ("0", "1", "2")
        }

    @pytest.mark.feature("launch.processes")
    def test_first_failure_counts(self) -> None:
        assert launch("time.sleep(1 - rank); sys.exit(3 + rank)") == 4

    def test_killed_rank(self) -> None:
        assert launch("rank or time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)") == 137

    def test_rank_kills_all_ranks_of_a_group_and_nothing_else(self, tmp_path: Path) -> None:
        code = "print(rank, flush=True); rank or time.sleep(1) or os.killpg(0, 9); time.sleep(99)"
        began = time.monotonic()
        with (tmp_path / "output").open("wb") as file:
            line = (sys.executable, "-c", RANK + code)
            assert launch_processes(2, (), line, output=file) == 137
        assert time.monotonic() - began < 60
        assert sorted((tmp_path / "output").read_text().split()) == ["0", "1"]


def test_python_has_to_start_ranks_itself(tmp_path: Path) -> None:
    with raises(ConfigError, code="launch.needs_command", key="LAUNCH.processes"):
        run([*SMALL, "LAUNCH.processes=2", f"RUN.dir={tmp_path}/run"])
    assert not (tmp_path / "run").exists()


def test_fit_has_to_start_ranks_itself(tmp_path: Path) -> None:
    points = TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    sections = {"LAUNCH": {"processes": 2}, "RUN": {"dir": str(tmp_path / "run")}}
    with raises(ConfigError, code="launch.needs_command", key="LAUNCH.processes"):
        fit(
            nn.Linear(4, 2),
            points,
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD,
            batch_size=4,
            epochs=1,
            **sections,
        )
    assert not (tmp_path / "run").exists()


def test_batch_is_checked_for_the_ranks_to_come() -> None:
    with raises(ConfigError, key="DATA.TRAIN.batch_size"):
        resolve_config(["LAUNCH.processes=3", "DATA.TRAIN.batch_size=64"])


@pytest.mark.parametrize(
    ("environment", "nodes", "program"),
    [
        ({}, 1, "phasetrain"),
        ({"TORCHELASTIC_RUN_ID": "a"}, 1, "torchrun --nproc-per-node=2 -m phasetrain"),
        (
            {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "1"},
            2,
            "torchrun --nproc-per-node=1 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT "
            "-m phasetrain",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 1, "srun --ntasks=2 phasetrain"),
    ],
)
def test_resume_command_starts_the_same_ranks(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], nodes: int, program: str
) -> None:
    place = Placement(size=2, nodes=nodes)
    setup = resolve_config(["RUN.dir=a/b"], place=place)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert format_command(setup) == f"{program} RUN.dir=a/b"
    assert format_resume(setup) == f"{program} resume a/b"


WORDS = (*SMALL, "LAUNCH.processes=2", "CHECKPOINT.every_updates=1", "MACHINE.threads=1")


def start(folder: Path) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "phasetrain", *WORDS, f"RUN.dir={folder}"]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    process = start(folder)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.count("completed after 15 updates") == 1
    return folder


@pytest.mark.feature(
    "launch.processes", "several ranks from one command, without torchrun", "`LAUNCH.processes`"
)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped_run_of_two_ranks_resumes_with_equal_bits(
    unbroken: Path, tmp_path: Path, number: int
) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    end = time.monotonic() + 200
    steps = folder / "metrics.jsonl"
    while not steps.exists() or steps.read_text().count('"kind": "step"') < 4:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=100)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number, output
        assert "Traceback" not in output
        assert f"resume with: phasetrain resume {folder}" in output
        assert status(folder)["exit_code"] == 128 + number
    again = start(folder)
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert differences_of_runs(unbroken, folder) == []


def test_warnings_about_overrides_are_left_to_the_ranks() -> None:
    printed = io.StringIO()
    with pytest.raises(RanksNeededError):
        run_engine(
            ["LAUNCH.processes=2"],
            terminal=Terminal(printed, live=False),
            warnings=["RUN.seed is given 2 times"],
        )
    assert printed.getvalue() == ""
    run_engine(
        [*SMALL, "RUN.engine=plan", "RUN.rehearse=false"],
        terminal=Terminal(printed, live=False),
        warnings=["RUN.seed is given 2 times"],
    )
    assert printed.getvalue().count("RUN.seed is given 2 times") == 1


@pytest.mark.addon("experiments")
@pytest.mark.slow
def test_rerun_starts_the_ranks_of_the_original(unbroken: Path) -> None:
    line = [sys.executable, "-m", "phasetrain", "rerun", str(unbroken)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"bit-identical to {unbroken}: weights sha256") == 1
    assert "world size" not in done.stdout + done.stderr
    assert differences_of_runs(unbroken, Path(f"{unbroken}-again")) == []
