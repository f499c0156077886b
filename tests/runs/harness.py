"""What whole-run tests share: small runs, kills at a step, and the comparison of two run folders."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from phasetrain.checkpoint import Checkpointer, Loaded
from phasetrain.hooks import Hook
from phasetrain.run import run
from phasetrain.storage import Storage
from phasetrain.terminal import Terminal
from phasetrain.train import Result

# Three epochs of five updates with a test after each; augmentation, dropout, batch norm and momentum all take part.
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
)
STEPS = 3 * (5 + 2)


class Killed(BaseException):
    """Acts out a SIGKILL: nothing of phasetrain handles it, so nothing is saved or said."""


class KillAfter(Hook):
    """Ends the run without a word after so many steps, train and test steps counted."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


class SaveEachStep(Hook):
    """Asks for a checkpoint after every step, test steps included."""

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        run.hooks.by_label["checkpoint"].signals.save = True


def train(folder: Path, *overrides: str, hooks: Mapping[str, Hook] | None = None) -> Result:
    """Run a small training quietly."""
    return run([*SMALL, f"RUN.dir={folder}", *overrides], hooks=hooks, terminal=Terminal(io.StringIO(), live=False))


def die(folder: Path, *overrides: str, hooks: Mapping[str, Hook]) -> None:
    """Run until `Killed`, as if the process had gone."""
    try:
        train(folder, *overrides, hooks=hooks)
    except Killed:
        return
    raise AssertionError("the run was to be killed and was not")


def newest(folder: Path) -> Loaded:
    """Return the newest checkpoint of a run folder."""
    loaded = Checkpointer(f"{folder}/checkpoints", Storage()).newest()
    assert loaded is not None
    return loaded


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what may differ between equal runs."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def differences(one: Any, other: Any, path: str = "state") -> list[str]:
    """Return the paths at which two nested states are not equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        equal = one.dtype == other.dtype and torch.equal(one, other)
        return [] if equal else [path]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, pair in pairs for found in differences(*pair, f"{path}.{i}")]
    return [] if one == other else [path]


def parted(one: Path, other: Path) -> list[str]:
    """Return in what two finished run folders differ: position, anything that learns, any logged number."""
    first, second = newest(one), newest(other)
    found = differences(first.manifest.state, second.manifest.state, "position")
    found += differences(first.state["task"], second.state["task"], "task")
    found += differences(records(one), records(other), "metrics.jsonl")
    return found


def leftovers(folder: Path, expected: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Return temporary files, trash and locks that a run has left behind."""
    marks = (".tmp-", ".trash-", ".aside-", "run.lock", "owner.json", "probe")
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    return [name for name in names if any(mark in name for mark in marks) and not expected(name)]
