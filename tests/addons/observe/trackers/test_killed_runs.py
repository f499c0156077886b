"""kill -9 at moments nobody chose: trackers have each step once, as in an unbroken run."""

import csv
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import SMALL, records
from processes import Launcher

from phasetrain.addons.observe.trackers.wandb import history_rows

TOOL = Path(__file__).parents[4] / "tools" / "run.py"
RUN = (
    "PHASES.epochs=40",
    "CHECKPOINT.every_updates=50",
    "HOOKS.metrics.every_updates=5",
    "HOOKS.csv.every_updates=5",
    "HOOKS.wandb.every_updates=5",
    "HOOKS.mlflow.every_updates=5",
    "HOOKS.mlflow.wait_seconds=120",
    "HOOKS.report=null",
)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the tool in a process group of its own."""
    command = [sys.executable, str(TOOL), f"RUN.dir={folder}", *RUN]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_each_tracker_gets_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    kills = 0
    for updates in (100, 300, 600):
        process, began = start(tmp_path), time.monotonic()
        while process.poll() is None and time.monotonic() - began < 100:
            time.sleep(0.05)
            logged = tmp_path / "metrics.jsonl"
            if logged.exists() and f'"updates": {updates}' in logged.read_text():
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
                break
        process.wait()
    last = start(tmp_path)
    assert last.wait(timeout=200) == 0
    assert kills == 3
    found = [(one["updates"], one["loss"]) for one in records(tmp_path) if one["kind"] == "step"]
    assert [updates for updates, _ in found] == list(range(5, 881, 5))
    with open(tmp_path / "csv" / "train-steps.csv", newline="") as file:
        assert [(int(row["updates"]), float(row["loss"])) for row in csv.DictReader(file)] == found
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        rows = base.execute(
            "select step, value from metrics where key = 'train/step_loss' order by step"
        ).fetchall()
        assert rows == found
        assert base.execute("select count(*) from runs").fetchall() == [(1,)]
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    sent = [row for file in files for row in history_rows(file.read_bytes())]
    assert [row["_step"] for row in sent] == list(range(len(sent)))
    assert [
        (row["updates"], row["train/step_loss"]) for row in sent if "train/step_loss" in row
    ] == found


@pytest.mark.addon("metrics")
@pytest.mark.slow
def test_three_ranks_resume_after_one_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    words = (
        *SMALL,
        "MACHINE.threads=1",
        "HOOKS.csv.every_updates=1",
        "HOOKS.tensorboard.every_updates=1",
    )
    words = (
        *words,
        "METERS.confusion_matrix={}",
        "RUN.imports=[process_parts]",
        "HOOKS.strike={rank: 2, update: 8}",
    )
    assert launcher.run(folder, 3, *words).codes[2] == -9
    assert launcher.run(folder, 3, *words).codes == [0, 0, 0]
    with open(folder / "csv" / "train-steps.csv", newline="") as file:
        assert [int(row["updates"]) for row in csv.DictReader(file)] == list(range(1, 16))
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    assert [one.step for one in found.Scalars("train/step_loss")] == list(range(1, 16))
    assert [one.step for one in found.Images("test/confusion_matrix")] == [5, 10, 15]
    assert not [
        path for path in folder.glob("tensorboard/*") if not path.name.endswith((".1", ".2"))
    ]
