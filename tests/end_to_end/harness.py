"""Helpers of end-to-end tests: start a small run, kill it at a step, compare two run folders."""

import io
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.config.addons import find_service
from phasetrain.hooks import Hook
from phasetrain.models import SmallCNN
from phasetrain.runs.ledger import FILE
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import KillAfter, Killed, SaveEachStep, differences

__all__ = [
    "KillAfter",
    "Killed",
    "SaveEachStep",
    "differences",
]  # re-exported from the proof kit

# Three epochs of five updates with a test after each; augmentation, dropout, batch norm and
# momentum all take part.
SMALL = (
    "PHASES.epochs=3",
    "PHASES.limit.train=5",
    "PHASES.limit.test=2",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=32",
    "DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}, {name: noise, std: 0.1}]",
    "MODEL.width=4",
    "MODEL.dropout=0.3",
    "MODEL.name=small_cnn",
    "HOOKS.metrics.every_updates=1",
    "HOOKS.console=null",
    "HOOKS.report=null",  # drawing it takes as long as several updates; REPORT turns it on
    "RUN.rehearse=false",  # tests of the rehearsal turn it on; it would double the time of others
)
STEPS = 3 * (5 + 2)
REPORT_FILES = {"predictions.json", "report.html"} if find_service("write_report") else set()
"""Files of the hook `report`, which is on by default where its add-on is installed."""

REPORT = ("HOOKS.report={}",) if REPORT_FILES else ()
"""Turns the hook `report` on after SMALL, where its add-on is installed."""


def train(folder: Path, *overrides: str, hooks: Mapping[str, Hook] | None = None) -> RunResult:
    """Run a small training without output."""
    return run(
        [*SMALL, f"RUN.dir={folder}", *overrides],
        hooks=hooks,
        terminal=Terminal(io.StringIO(), live=False),
    )


def run_until_killed(folder: Path, *overrides: str, hooks: Mapping[str, Hook]) -> None:
    """Run a small training until a hook raises `Killed`, which simulates a kill of the process."""
    try:
        train(folder, *overrides, hooks=hooks)
    except Killed:
        return
    raise AssertionError("the run was to be killed and was not")


def newest(folder: Path) -> LoadedCheckpoint:
    """Return the newest checkpoint of a run folder."""
    loaded = Checkpointer(f"{folder}/checkpoints", Storage()).load_newest()
    assert loaded is not None
    return loaded


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without times, which differ between equal runs."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "time"} for line in lines
    ]


def ledger_bytes(folder: Path) -> bytes:
    """Return the content of steps.ledger, empty for a run without one."""
    return (folder / FILE).read_bytes() if (folder / FILE).exists() else b""


def differences_of_runs(one: Path, other: Path) -> list[str]:
    """Return the differences of two finished run folders: position, task state, logged numbers and
    bytes of the ledger."""
    first, second = newest(one), newest(other)
    found = differences(first.manifest.state, second.manifest.state, "position")
    found += differences(first.state["task"], second.state["task"], "task")
    found += differences(records(one), records(other), "metrics.jsonl")
    found += differences(ledger_bytes(one), ledger_bytes(other), FILE)
    return found


def leftovers(folder: Path, expected: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Return the temporary files, trash and locks that a run left behind."""
    marks = (".tmp-", ".trash-", ".aside-", "run.lock", "owner.json", "probe")
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    return [name for name in names if any(mark in name for mark in marks) and not expected(name)]


def status(folder: Path) -> dict[str, Any]:
    """Return the content of status.json."""
    found = json.loads((folder / "status.json").read_text())
    assert isinstance(found, dict)
    return found


def state_after_signal(number: int) -> str:
    """Return the state of a run that was stopped by a signal."""
    return "interrupted" if number == signal.SIGINT else "preempted"


def is_clean(ended: Any, folder: Path) -> bool:
    """Assert that a run of `faulty.Starter` left no process, shared memory or temporary file, and
    return True."""
    assert (ended.alive, ended.segments, leftovers(folder)) == ([], [], [])
    return True


def save_start_weights(path: Path) -> Path:
    """Write weights to start SMALL from, with statistics of batch norms that are not the initial
    ones, and return the path."""
    torch.manual_seed(7)
    state = SmallCNN(10, width=4).state_dict()
    for name, tensor in state.items():
        if name.endswith("running_mean"):
            tensor.normal_()
    save_file(state, path)
    return path
