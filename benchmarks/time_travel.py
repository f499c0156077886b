"""Checks that visits to past updates have the bits of the run.

    python benchmarks/time_travel.py at order relog kill

Three tasks (images with batch norm, dropout and accumulation; a table; text) are trained twice, with
all checkpoints and with one after every tenth update. `at` visits random updates of the second run
and compares all weights and the optimizer with the checkpoint of the first run, trains the update
and compares it with the ledger, and steps back. `order` lists the samples of all updates of each
task, compares them with the ledger and with the rows of random samples, and finds a sample in an
epoch of 10**7. `relog` trains runs with the hooks of relog_hooks.py and without, runs each hook over
each of the latter in one process and in three, and compares all lines. `kill` sends SIGKILL to the
commands at random moments, and checks that the run folder is untouched and that no half of a file
is left. The exit code is 1 if something differs.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import relog_hooks
import torch
from torch.utils.data import Dataset
from what_if import QUIET, TASKS

from phasetrain.addons.experiments.options import RelogOptions
from phasetrain.addons.experiments.travel.order import SampleOrder
from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.relog import relog
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.app.api import run
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.hooks import Hook
from phasetrain.runs.view import RunView, read_status
from phasetrain.runtime.machine import seed_of
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import differences

COMMON = (*QUIET, "CHECKPOINT.every_updates=10", "CHECKPOINT.keep_every.updates=10")
ALL = ("CHECKPOINT.every_updates=1", "CHECKPOINT.keep_every.updates=1")
LEARNED = ("model", "loss", "updater")


def train(folder: Path, *words: str, hooks: Sequence[Hook] = ()) -> None:
    """Train a run, unless it has been trained."""
    if read_status(folder).state != "finished":
        terminal = Terminal(io.StringIO(), live=False)
        run([*words, f"RUN.dir={folder}"], terminal=terminal, hooks=hooks)


def hash_folder(folder: Path) -> str:
    """Return a digest of all files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path).encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def check_visits(folder: Path, task: str, visits: int) -> bool:
    """Visit random updates of a task, print the figures, and return whether all were right."""
    past, complete = folder / task, folder / f"{task}-all"
    train(past, *TASKS[task], *COMMON)
    train(complete, *TASKS[task], *COMMON, *ALL)
    reader = CheckpointReader(f"{complete}/checkpoints", Storage())
    saved = {
        checkpoint.manifest.state["updates"]: checkpoint.name
        for checkpoint in reader.list_checkpoints()
    }
    before = hash_folder(past)
    generator = np.random.default_rng(seed_of(0, "at", task))
    equal_states = equal_steps = 0
    seconds, back = [], []
    with open_past_run(str(past)) as opened:
        for update in generator.integers(2, opened.last + 1, visits).tolist():
            began = time.perf_counter()
            with Visit(opened, update) as visit:
                seconds.append(time.perf_counter() - began)
                loaded = reader.load(f"{reader.root}/{saved[update - 1]}").state["task"]
                state = visit.task.shared_state()
                expected, actual = (
                    {name: parts[name] for name in LEARNED} for parts in (loaded, state)
                )
                equal_states += not differences(expected, actual, "task")
                equal_steps += visit.step().differs == ()
                began = time.perf_counter()
                visit.back()
                back.append(time.perf_counter() - began)
                equal_steps += visit.step().differs == ()
    is_untouched = hash_folder(past) == before
    print(
        f"at, {task}: {equal_states} of {visits} states and {equal_steps} of {2 * visits} steps have "
        f"the bits of the run; median {median(seconds):.2f} s to the update, "
        f"{1000 * median(back):.0f} ms back; folder {'untouched' if is_untouched else 'CHANGED'}"
    )
    return equal_states == visits and equal_steps == 2 * visits and is_untouched


class Numbers(Dataset):
    """A dataset of 10**7 samples."""

    classes = 2
    shape = (4,)

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full(self.shape, index % 7, dtype=torch.float32), index % 2


def check_order(folder: Path, task: str, samples: int = 50) -> bool:
    """List the samples of all updates, find random samples, and return whether all were right."""
    past = folder / task
    train(past, *TASKS[task], *COMMON)
    with open_past_run(str(past)) as opened:
        order = SampleOrder(opened)
        table = order.list_updates(1, order.updates)
        ids = np.array(table.list_column("sample"))
        updates = np.array(table.list_column("update"))
        generator = np.random.default_rng(seed_of(0, "order", task))
        chosen = generator.integers(0, len(opened.data["train"].reader.dataset), samples).tolist()
        equal = sum(
            order.find_sample(sample).list_column("update") == updates[ids == sample].tolist()
            for sample in chosen
        )
    print(
        f"order, {task}: samples of {table.checked} of {order.updates} updates equal the ledger "
        f"({'all' if table.wrong is None else 'NOT all'}); {equal} of {samples} samples are found "
        "where the list has them"
    )
    return table.wrong is None and table.checked == order.updates and equal == samples


def check_large_order(folder: Path) -> bool:
    """Find samples in an epoch of 10**7, and print the time of each."""
    past = folder / "numbers"
    words = ("DATA.TRAIN.dataset=time_travel.Numbers", "DATA.TRAIN.transforms=[]", "DATA.TEST=null")
    limits = ("PHASES.epochs=100", "RUN.pause_at=3", "CHECKPOINT.every_updates=1")
    run(
        [*words, *limits, *QUIET, "MODEL.name=mlp", f"RUN.dir={past}"],
        terminal=Terminal(io.StringIO(), live=False),
    )
    with open_past_run(str(past), trust=True) as opened:
        order = SampleOrder(opened)
        sample = order.list_updates(2, 2).list_column("sample")[5]
        began = time.perf_counter()
        table = order.find_sample(sample)
        seconds = time.perf_counter() - began
    updates = table.list_column("update")
    is_found = updates[0] == 2 and len(updates) == 100 and table.wrong is None
    print(
        f"order, 10**7 samples: sample {sample} is found in {len(updates)} epochs in "
        f"{10 * seconds:.2f} ms each ({'right' if is_found else 'WRONG'})"
    )
    return is_found


def list_new(live: Path, past: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of a run with all hooks, with some names that another run does not have."""
    old = [line.content for line in RunView(past).lines]
    lines = []
    for line in (dict(line.content) for line in RunView(live).lines):
        key = {"step": "logs", "phase": "metrics"}.get(line["kind"])
        if key is None:
            lines += [line] if line["kind"] in names else []
            continue
        known = {name for other in old for name in other.get(key, {})}
        values = {name: line.get(key, {}).get(name) for name in names}
        new = {name: value for name, value in values.items() if value is not None}
        if new.keys() - known:
            entries = {name: line[name] for name in line if name not in ("loss", "lr", "time")}
            entries = {name: entries[name] for name in entries if name not in ("logs", "metrics")}
            lines.append(entries | {key: new} | ({"directions": {}} if key == "metrics" else {}))
    return [{key: line[key] for key in line if key != "time"} for line in lines]


def check_relog(folder: Path, runs: int, processes: Sequence[int]) -> bool:
    """Run each hook over each run, print the figures, and return whether all lines were right."""
    equal = dict.fromkeys(processes, 0)
    alone = 0
    for number in range(runs):
        task = list(TASKS)[number % len(TASKS)]
        words = (*TASKS[task], *COMMON, f"RUN.seed={number}", "HOOKS.metrics.every_updates=1")
        past, live = folder / f"relog-{number}", folder / f"relog-{number}-live"
        train(past, *words)
        # In a list: their random numbers depend on their labels, which relog chooses in this way.
        train(live, *words, hooks=[kind() for kind in relog_hooks.HOOKS])
        for kind in relog_hooks.HOOKS:
            chosen = folder / f"{kind.__name__}.py"
            write_hook(chosen, kind.__name__)
            for jobs in processes:
                done = relog(str(past), RelogOptions(str(chosen), jobs=jobs))
                lines = [json.loads(line) for line in Path(done.path).read_text().splitlines()]
                is_equal = bool(lines) and lines == list_new(live, past, done.names)
                equal[jobs] += is_equal
                alone += bool(done.kept)
                if not is_equal:
                    print(f"relog, {task}, seed {number}, {kind.__name__}, {jobs}: lines DIFFER")
    pairs = runs * len(relog_hooks.HOOKS)
    for jobs, count in equal.items():
        print(f"relog, {jobs} processes: {count} of {pairs} pairs of hook and run have equal lines")
    print(f"relog: {alone} of them by hooks that keep values, and ran from the start of the run")
    return all(count == pairs for count in equal.values())


def write_hook(path: Path, name: str) -> None:
    """Write a file with one of the hooks."""
    source = str(Path(relog_hooks.__file__).parent)
    path.write_text(
        f"import sys\nsys.path.insert(0, {source!r})\nimport relog_hooks\n"
        f"hook = relog_hooks.{name}()\n"
    )


def check_kills(folder: Path, kills: int, seconds: float) -> bool:
    """Kill commands at random moments, print the figures, and return whether nothing was changed
    and the commands that were not killed succeeded."""
    past = folder / "killed"
    train(past, *TASKS["digits"], *COMMON)
    before = hash_folder(past)
    hook = folder / "killed.py"
    write_hook(hook, "WeightNorm")
    script = folder / "killed_script.py"
    script.write_text("for _ in range(10):\n    step()\n    back()\n")
    commands = (
        ["at", str(past), "37", "--script", str(script)],
        ["order", str(past), "--between", "1", "60"],
        ["relog", str(past), "--hook", str(hook), "--jobs", "2"],
    )
    generator = np.random.default_rng(seed_of(0, "kill"))
    untouched = killed = failed = 0
    for number in range(kills):
        words = [sys.executable, "-m", "phasetrain", *commands[number % len(commands)]]
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                failed += process.wait(timeout=float(generator.uniform(1, seconds))) != 0
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
        written = Path(f"{past}-relog/killed.relog.jsonl")
        is_whole = not written.exists() or all(
            json.loads(line) for line in written.read_text().splitlines()
        )
        untouched += hash_folder(past) == before and is_whole
    print(
        f"kill: {killed} of {kills} commands were killed, {failed} others failed; "
        f"{untouched} of {kills} changed nothing"
    )
    return untouched == kills and not failed


def main() -> int:
    """Run the checks and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=["at", "order", "relog", "kill"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--visits", type=int, default=34, help="visits of each task")
    parser.add_argument("--runs", type=int, default=10, help="runs of relog")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=15, help="latest moment of a kill")
    parser.add_argument("--folder", type=Path, default=None)
    flags = parser.parse_args()
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="time-travel-"))
    results = []
    for task in flags.tasks:
        if "at" in flags.what:
            results.append(check_visits(folder, task, flags.visits))
        if "order" in flags.what:
            results.append(check_order(folder, task))
    if "order" in flags.what:
        results.append(check_large_order(folder))
    if "relog" in flags.what:
        results.append(check_relog(folder, flags.runs, flags.processes))
    if "kill" in flags.what:
        results.append(check_kills(folder, flags.kills, flags.seconds))
    return int(not all(results))


if __name__ == "__main__":
    raise SystemExit(main())
