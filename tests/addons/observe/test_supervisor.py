"""A run that hangs is ended and started again, with the bits of a run that does not."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, differences_of_runs, status
from raising import raises

import phasetrain
from phasetrain.addons.observe import supervisor
from phasetrain.addons.observe.heartbeat import Heartbeat, read_heartbeat, write_heartbeat
from phasetrain.addons.observe.supervisor import (
    Frame,
    HangError,
    Watch,
    find_own_frame,
    list_descendants,
    supervise,
)
from phasetrain.app.api import run
from phasetrain.app.local_launch import launch_processes
from phasetrain.errors import ConfigError
from phasetrain.runtime.child_processes import HEARTBEATS

SECONDS = 5
WORDS = (*SMALL, "CHECKPOINT.every_updates=2", "MACHINE.threads=1", "RUN.exact=false")


def start(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command line to its end, with the parts that hang."""
    line = [sys.executable, "-m", "phasetrain", *WORDS, f"RUN.dir={folder}", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(
        [*line, "RUN.imports=[hangs_for_a_test]"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of undisturbed runs by number of ranks, made when they are needed."""
    return {}


def reference(unbroken: dict[int, Path], folder: Path, size: int, *words: str) -> Path:
    if size not in unbroken:
        done = start(folder, f"LAUNCH.processes={size}", *words)
        assert done.returncode == 0, done.stdout
        unbroken[size] = folder
    return unbroken[size]


def hook(marker: Path, **params: object) -> str:
    text = ", ".join(f"{key}: {value}" for key, value in params.items())
    return f"HOOKS.hangs={{marker: {marker}, {text}}}"


@pytest.mark.feature(
    "launch.supervise", "a run that hangs is ended and started again", "`LAUNCH.supervise`"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "params", "text"),
    [
        (1, {"event": "on_forward"}, "in a step of training"),
        (1, {"event": "on_forward", "way": "lock"}, "in hold_the_lock"),
        (1, {"event": "on_forward", "way": "c"}, "in block_in_c"),
        (1, {"event": "on_step"}, "in <lambda>"),
        (1, {"event": "on_save"}, "saving a checkpoint"),
        (1, {"event": "on_end"}, "after its last step"),
        (1, {"event": "on_end", "way": "exit"}, "after its last step"),
        (2, {"event": "on_forward", "rank": 1}, "rank 1 of 2"),
        (2, {"event": "on_step", "rank": 0, "way": "c"}, "rank 0 of 2"),
        (2, {"event": "on_step", "rank": 1, "way": "collective"}, "in call_alone"),
    ],
)
def test_hang_is_ended_and_changes_no_bit(
    unbroken: dict[int, Path],
    tmp_path: Path,
    size: int,
    params: dict[str, object],
    text: str,
) -> None:
    words = (f"LAUNCH.processes={size}", f"LAUNCH.supervise={SECONDS}")
    done = start(tmp_path / "run", *words, hook(tmp_path / "marker", **params))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "marker").read_text() == "x"
    assert done.stdout.count(f"has made no progress for {SECONDS} s") == 1
    assert text in done.stdout
    assert status(tmp_path / "run")["state"] == "finished"
    undisturbed = reference(unbroken, tmp_path / "unbroken", size)
    assert differences_of_runs(undisturbed, tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_second_hang_in_the_same_place_ends_the_run(tmp_path: Path, workers: int) -> None:
    transform = f"{{name: hangs, armed: {tmp_path}/armed}}"
    done = start(
        tmp_path / "run",
        f"LAUNCH.supervise={SECONDS}",
        f"DATA.TRAIN.transforms=[{transform}]",
        f"DATA.TRAIN.workers={workers}",
        f"HOOKS.arms={{file: {tmp_path}/armed}}",
        "CHECKPOINT.every_updates=1",
    )
    assert done.returncode == 1, done.stdout
    # A worker reads ahead.
    where = re.compile(
        r"waiting for a batch \(phase 0, step \d, after \d updates\), at " + re.escape(f"{HANGS}:")
    )
    assert len(where.findall(done.stdout)) == 2
    assert re.search(rf"`phasetrain order {tmp_path}/run --update \d`", done.stdout)


HANGS = Path(__file__).parent / "hangs_for_a_test.py"

HANG = """
import os, sys, time
from phasetrain.addons.observe.heartbeat import Heartbeat, write_heartbeat
for step in range(3):
    beat = Heartbeat("", 1, step, 40 + step, "train", 7 + step)
    write_heartbeat(os.environ["PHASETRAIN_HEARTBEATS"], beat)
    time.sleep(0.6)
time.sleep({seconds})
"""
"""A process that takes three steps and hangs."""


@pytest.fixture
def heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(HEARTBEATS, str(tmp_path))
    return str(tmp_path)


class TestWatch:
    def launch(self, heartbeats: str, code: str, size: int = 1) -> tuple[int, Watch]:
        watch = Watch(heartbeats, 2.5)
        return launch_processes(size, (), (sys.executable, "-c", code), watch=watch.look), watch

    def test_process_without_progress_is_killed(self, heartbeats: str) -> None:
        code, watch = self.launch(heartbeats, HANG.format(seconds=99))
        assert code == 137
        assert watch.hang is not None
        assert watch.hang.place == (1, 2, "train")
        assert watch.hang.describe(2.5) == (
            "the run has made no progress for 2.5 s, in a step of training (phase 1, step 2, after "
            "42 updates)"
        )

    def test_process_that_ends_in_time_is_left_alone(self, heartbeats: str) -> None:
        code, watch = self.launch(heartbeats, HANG.format(seconds=0.1) + "sys.exit(3)")
        assert (code, watch.hang) == (3, None)

    def test_rank_that_is_behind_is_named(self, heartbeats: str) -> None:
        late = HANG.format(seconds=99).replace("range(3)", "range(3 - int(os.environ['RANK']))")
        _, watch = self.launch(heartbeats, late, size=3)
        assert watch.hang is not None
        assert watch.hang.ranks == (2,)
        assert watch.hang.describe(2.5).startswith("rank 2 of 3 has made no progress for 2.5 s")

    def test_start_has_a_limit_of_its_own(
        self, heartbeats: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, watch = self.launch(heartbeats, "import time; time.sleep(4)")
        assert (code, watch.hang) == (0, None)
        monkeypatch.setattr(supervisor, "START_SECONDS", 3.0)
        code, watch = self.launch(heartbeats, "import time; time.sleep(99)")
        assert code == 137
        assert watch.hang is not None
        assert watch.hang.describe(2.5) == "the run has not begun 3 s after its start"


def test_hang_that_happens_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", HANG.format(seconds=99))
    attempts = []

    def launch(size: int, words: object, *, watch: Any) -> int:
        attempts.append(size)
        return launch_processes(size, (), command, watch=watch)

    monkeypatch.setattr(supervisor, "launch_processes", launch)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.0)
    config = {"LAUNCH": {"processes": 1, "supervise": 2.5}, "HOOKS": {"watchdog": {}}}
    with raises(HangError, code="launch.hangs_again", key="LAUNCH.supervise"):
        supervise(config, ())
    assert attempts == [1, 1]
    assert HEARTBEATS not in os.environ


def test_hang_after_a_signal_to_stop_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal; signal.signal(15, print); os.kill(os.getppid(), 15)"
    command = (sys.executable, "-c", code + HANG.format(seconds=99))
    monkeypatch.setattr(
        supervisor,
        "launch_processes",
        lambda size, words, *, watch: launch_processes(size, (), command, watch=watch),
    )
    config = {"LAUNCH": {"processes": 1, "supervise": 2.5}, "HOOKS": {"watchdog": {}}}
    assert supervise(config, ()) == 143


def test_supervision_needs_the_watchdog() -> None:
    config = {"LAUNCH": {"processes": 1, "supervise": True}, "HOOKS": {"console": {}}}
    with raises(ConfigError, code="launch.no_heartbeat", key="LAUNCH.supervise"):
        supervise(config, ())


def test_own_frame_is_the_innermost_one_of_the_user() -> None:
    library = Frame(str(Path(torch.__file__).parent / "nn/modules/module.py"), 1, "forward")
    framework = Frame(str(Path(phasetrain.__file__).parent / "tasks/task.py"), 2, "step")
    frozen = Frame("<frozen importlib>", 3, "load")
    own = Frame("/home/me/loss.py", 4, "forward")
    outer = Frame("/home/me/train.py", 5, "main")
    assert find_own_frame([library, frozen, own, framework, outer]) == own
    assert find_own_frame([library, framework]) == library
    assert find_own_frame([]) is None


def test_descendants_are_found() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    end = time.monotonic() + 60
    while not list_descendants(process.pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(list_descendants(process.pid)) == 1
    process.communicate(b"\n", timeout=60)
    assert list_descendants(process.pid) == []


def test_heartbeat_is_read_as_written(tmp_path: Path) -> None:
    beat = Heartbeat("runs/a", 2, 3, 45, "data", 51)
    write_heartbeat(str(tmp_path), beat)
    assert read_heartbeat(str(tmp_path), os.getpid()) == beat
    assert read_heartbeat(str(tmp_path), 1) is None


def test_python_api_does_not_supervise(tmp_path: Path) -> None:
    with raises(ConfigError, code="launch.needs_command", key="LAUNCH.supervise"):
        run([*SMALL, "LAUNCH.supervise=true", f"RUN.dir={tmp_path}/run"])


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
def test_seconds_are_checked(value: str) -> None:
    with raises(ConfigError, key="LAUNCH.supervise"):
        run([*SMALL, f"LAUNCH.supervise={value}"])
