"""A signal stops a run at the next step boundary, with a checkpoint, the right exit code and a true
status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from faulty import ONE, Starter
from harness import (
    SMALL,
    differences_of_runs,
    is_clean,
    leftovers,
    newest,
    state_after_signal,
    status,
    train,
)

from phasetrain.cli import main
from phasetrain.hooks import Hook


class SignalAt(Hook):
    """Sends this process a signal in the middle of a step, train and test steps counted."""

    observe_only = True

    def __init__(self, step: int, number: int) -> None:
        self.left, self.number = step, number

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder)
    return folder


STOPS = [(3, (0, 3)), (5, (0, 5)), (6, (1, 1)), (7, (1, 2)), (8, (2, 1))]
"""Steps, train and test steps counted, and the position after them."""


@pytest.mark.by_default("15-3-position0", "2-6-position7")
@pytest.mark.parametrize(
    ("number", "step", "position"),
    [
        (number, *stop)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for stop in (STOPS if number != signal.SIGHUP else STOPS[2:3])
    ],
)
def test_a_stop_signal_saves_at_the_step_boundary(
    unbroken: Path, tmp_path: Path, number: int, step: int, position: tuple[int, int]
) -> None:
    result = train(tmp_path, hooks={"signal": SignalAt(step, number)})
    name = signal.Signals(number).name
    ending = state_after_signal(number)
    assert (result.state, result.exit_code, result.reason) == (ending, 128 + number, name)
    state = newest(tmp_path).manifest.state
    assert (state["phase"], state["step"], state["finished"]) == (*position, "")
    told = status(tmp_path)
    assert (told["state"], told["exit_code"], told["reason"], told["attempt"]) == (
        ending,
        128 + number,
        name,
        1,
    )
    assert leftovers(tmp_path) == []
    assert train(tmp_path).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []
    told = status(tmp_path)
    assert (told["state"], told["exit_code"], told["attempt"], told["updates"]) == (
        "finished",
        0,
        2,
        15,
    )


@pytest.mark.by_default(1)
@pytest.mark.parametrize("step", [6, 3])
def test_sigusr1_saves_and_training_continues(unbroken: Path, tmp_path: Path, step: int) -> None:
    seen: list[str] = []

    class Watch(Hook):
        def on_save(self, run: Any) -> None:
            seen.append(f"{run.state.phase}.{run.state.step}")

    overrides = ("CHECKPOINT.every_epochs=null",)
    result = train(
        tmp_path, *overrides, hooks={"signal": SignalAt(step, signal.SIGUSR1), "watch": Watch()}
    )
    assert result.state == "finished"
    assert seen == [{3: "0.3", 6: "1.1"}[step], "6.0"]
    assert differences_of_runs(unbroken, tmp_path) == []


def test_a_second_stop_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    class Impatient(Hook):
        def on_forward(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        train(tmp_path, hooks={"impatient": Impatient()})
    assert caught.value.code == 143
    assert not (tmp_path / "checkpoints").exists()
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("preempted", 143)
    assert leftovers(tmp_path) == []


def test_finished_run_is_left_unchanged(unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in unbroken.rglob("*")}
    assert main([*SMALL, f"RUN.dir={unbroken}"]) == 0
    assert "is a finished run (completed after 15 updates)" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in unbroken.rglob("*")} == before


SLOW_STEPS = """
import time
from pathlib import Path
from phasetrain.hooks import HOOKS, Hook

@HOOKS.register("slow_steps")
class SlowSteps(Hook):
    def on_step(self, run, phase, out):
        time.sleep(0.05)
        if run.state.updates == 3:
            Path("a_few_steps_in").touch()
"""


def test_sigterm_to_the_whole_process_group_spares_the_workers_until_the_save(
    starter: Starter, tmp_path: Path
) -> None:
    (tmp_path / "slow_steps.py").write_text(SLOW_STEPS)
    folder = tmp_path / "run"
    words = (*SMALL, ONE, "DATA.TRAIN.workers=2", "PHASES.limit.train=50")
    pid = starter.start(folder, *words, "RUN.imports=[slow_steps]", "HOOKS.slow_steps={}")
    wait_for((tmp_path / "a_few_steps_in").exists)
    os.killpg(pid, signal.SIGTERM)
    ended = starter.wait()
    assert ended.code == 143, ended.output
    assert "exited unexpectedly" not in ended.output
    assert "resume with: phasetrain" in ended.output
    assert newest(folder).manifest.state["updates"] > 0
    assert status(folder)["state"] == "preempted"
    assert is_clean(ended, folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_while_workers_start(
    tmp_path: Path, method: str, number: int
) -> None:
    words = [
        *SMALL,
        f"RUN.dir={tmp_path}",
        "DATA.TRAIN.workers=2",
        f"DATA.TRAIN.start_method={method}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "phasetrain", *words, "PHASES.limit.train=50", "PHASES.epochs=30"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(
        lambda: (tmp_path / "metrics.jsonl").exists()
    )  # the hooks have started, the workers are next
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert newest(tmp_path).manifest.facts.why == "signal"
    wait_for(lambda: not alive_in_group(process.pid))


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.05)


def alive_in_group(group: int) -> bool:
    """Tell whether a process group still has members."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
