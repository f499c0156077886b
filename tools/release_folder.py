"""Make the two run folders that a release keeps: `python tools/release_folder.py [FOLDER]`.

FOLDER is tests/data/releases/MAJOR.MINOR by default, and must not exist. `finished` has 20 updates;
`stopped` got SIGTERM at update 20 of 400 or soon after. `expected.json` has the digest with which
this version finishes `stopped`. `tests/end_to_end/test_releases.py` lets every later version do the
same.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import phasetrain

RELEASES = Path(__file__).parents[1] / "tests" / "data" / "releases"
LIMIT_SECONDS = 120
SETTINGS = (
    "MODEL.name=mlp",
    "MODEL.hidden=[16]",
    "DATA.TRAIN.dataset=digits",
    "DATA.TRAIN.subset.samples=320",
    "DATA.TEST.subset.samples=128",
    "DATA.TRAIN.batch_size=32",
    "OPTIMIZER.momentum=0.9",
    "OPTIMIZER.lr=0.05",
    "METERS.accuracy={}",
    "METERS.loss={}",
    "CHECKPOINT.every_updates=20",
    "CHECKPOINT.keep_last=2",
    "MACHINE.threads=1",
    "OPTIMIZER.SCHEDULES.lr.name=cosine",
    "HOOKS.early_stopping.monitor=test/accuracy",
    "HOOKS.early_stopping.patience=50",
    "HOOKS.metrics.every_updates=20",
    "HOOKS.report=null",
)
KEPT = (
    *("checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "overrides.yaml"),
    *("plan.json", "predictions.json", "status.json", "steps.ledger"),
)


def start(folder: Path, epochs: int, *words: str) -> subprocess.Popen[str]:
    """Start a training."""
    line = [sys.executable, "-m", "phasetrain", *SETTINGS, f"PHASES.epochs={epochs}", *words]
    return subprocess.Popen(
        [*line, f"RUN.dir={folder.name}"],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], expected: int = 0) -> None:
    """Wait for the end of a training.

    Raises:
        RuntimeError: it has another exit code than expected.
    """
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    if process.returncode != expected:
        raise RuntimeError(f"exit code {process.returncode}\n{output}")


def wait_for_updates(folder: Path, updates: int) -> None:
    """Wait until a run has a checkpoint with a number of updates."""
    end = time.monotonic() + LIMIT_SECONDS
    status = folder / "status.json"
    while time.monotonic() < end:
        if status.exists() and json.loads(status.read_text()).get("updates", 0) >= updates:
            return
        time.sleep(0.01)
    raise RuntimeError(f"{folder} has not reached update {updates}")


def remove_traces(folder: Path) -> None:
    """Remove what a resume does not read, and what tells about the machine and its user."""
    for path in folder.iterdir():
        if path.name not in KEPT:
            path.unlink() if path.is_file() else shutil.rmtree(path)
    path = folder / "environment.json"
    content = json.loads(path.read_text())
    content.update(executable="python3", folder=".", variables={}, installed={}, git=None)
    content["host"]["name"] = "host"
    path.write_text(json.dumps(content, indent=1) + "\n")


def make(target: Path) -> None:
    """Make the folders of the present version."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        finish(start(work / "finished", 2))
        process = start(work / "stopped", 40)
        wait_for_updates(work / "stopped", 20)
        process.send_signal(signal.SIGTERM)
        finish(process, 128 + signal.SIGTERM)
        shutil.copytree(work / "stopped", work / "resumed")
        finish(start(work / "resumed", 40))
        digest = json.loads((work / "resumed" / "status.json").read_text())["digest"]
        (work / "expected.json").write_text(json.dumps({"digest": digest}) + "\n")
        for one in ("finished", "stopped"):
            remove_traces(work / one)
        target.mkdir(parents=True)
        for one in ("finished", "stopped", "expected.json"):
            shutil.move(work / one, target / one)


if __name__ == "__main__":
    minor = ".".join(phasetrain.__version__.split(".")[:2])
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else RELEASES / minor
    if chosen.exists():
        sys.exit(f"{chosen} exists: the folders of a release are never made again")
    make(chosen)
    size = sum(path.stat().st_size for path in chosen.rglob("*") if path.is_file())
    print(f"{os.fspath(chosen)}: {size // 1000} kB")
