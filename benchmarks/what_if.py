"""Checks that runs without samples, trained from the last checkpoint before they matter, end with the
digests of runs from scratch.

    python benchmarks/what_if.py --sets 50 --out what_if.jsonl

Draws random sets of 1, 10 and 100 samples for three tasks (images with batch norm, dropout and
accumulation; a table; text), with one process and with three. A set that is in the file already is
not repeated, so a killed benchmark continues. The exit code is 1 if a digest differs.
"""

import argparse
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.what_if import RECEIPT, Question, answer
from phasetrain.app.api import run
from phasetrain.app.engines import run_engine
from phasetrain.app.setup import resolve_config
from phasetrain.runs.view import read_status
from phasetrain.runtime.machine import seed_of
from phasetrain.runtime.terminal import Terminal

QUIET = ("HOOKS.console=null", "HOOKS.report=null", "RUN.rehearse=false", "MACHINE.threads=1")
COMMON = (*QUIET, "CHECKPOINT.every_updates=5", "CHECKPOINT.keep_every.updates=5")
TASKS = {
    "digits": (
        *("MODEL.name=small_cnn", "MODEL.width=4", "MODEL.dropout=0.3", "DATA.TRAIN.batch_size=48"),
        *("OPTIMIZER.accumulate=2", "PHASES.epochs=2"),
        "DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}, {name: noise, std: 0.1}]",
    ),
    "tabular": ("experiment=tabular", "DATA.TRAIN.batch_size=30", "PHASES.epochs=4"),
    "text": (
        "experiment=text_tiny",
        "DATA.TRAIN.batch_size=30",
        "PHASES.updates=40",
        "PHASES.test_every.updates=20",
    ),
}
SIZES = (1, 10, 100)


def train(folder: Path, processes: int, *words: str) -> str:
    """Train a run, and return the digest of its weights."""
    line = [*words, *COMMON, f"RUN.dir={folder}"]
    if processes == 1:
        return run(line, terminal=Terminal(io.StringIO(), live=False)).digest
    start([*line, f"LAUNCH.processes={processes}"])
    return read_status(folder).digest


def start(words: list[str]) -> None:
    """Run a command line in processes of its own."""
    command = [sys.executable, "-m", "phasetrain", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if ended.returncode:
        raise RuntimeError(f"{words}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def rerun(base: Path, folder: Path, processes: int, ids: list[int]) -> dict[str, Any]:
    """Answer what a run would have been without samples, and return the receipt."""
    text = ",".join(map(str, ids))
    if processes > 1:
        start(["rerun", str(base), "--without", text, f"RUN.dir={folder}"])
    else:
        answer(
            str(base),
            [f"RUN.dir={folder}"],
            Question(without=(text,)),
            run=lambda words, stored: run_engine(
                words, stored=stored, terminal=Terminal(io.StringIO(), live=False)
            ),
        )
    receipt: dict[str, Any] = json.loads((folder / RECEIPT).read_text())
    return receipt


def check_set(folder: Path, task: str, processes: int, size: int, number: int) -> dict[str, Any]:
    """Compare a rerun without a random set of samples with the run from scratch."""
    base = folder / f"{task}-{processes}"
    if read_status(base).state != "finished":
        train(base, processes, *TASKS[task])
    setup = resolve_config([*TASKS[task], *COMMON, f"RUN.dir={base}"])
    samples = len(ComparedRun.open(setup).data["train"].reader.dataset)
    generator = np.random.default_rng(seed_of(0, task, size, number))
    ids = generator.permutation(samples)[:size].tolist()
    name = f"{task}-{processes}-{size}-{number}"
    receipt = rerun(base, folder / f"{name}-rerun", processes, ids)
    scratch = folder / f"{name}-scratch"
    digest = train(scratch, processes, *TASKS[task], f"DATA.TRAIN.exclude={ids}")
    return {
        "name": name,
        "equal": receipt["digest"] == digest,
        "changed": digest != receipt["original_digest"],
        "saved": receipt["saved_updates"],
        "updates": receipt["updates"],
        "size": size,
    }


def main() -> int:
    """Check all sets that are not in the file yet, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=50, help="sets of each size")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--out", type=Path, default=Path("what_if.jsonl"))
    parser.add_argument("--folder", type=Path, default=Path("what_if_runs"))
    flags = parser.parse_args()
    rows = []
    if flags.out.exists():
        rows = [json.loads(line) for line in flags.out.read_text().splitlines()]
    done = {row["name"] for row in rows}
    for number in range(flags.sets):
        for task in flags.tasks:
            for processes in flags.processes:
                for size in flags.sizes:
                    if f"{task}-{processes}-{size}-{number}" in done:
                        continue
                    rows.append(check_set(flags.folder, task, processes, size, number))
                    with flags.out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    equal = Counter(row["equal"] for row in rows)
    changed = sum(row["changed"] for row in rows)
    print(f"{len(rows)} sets: {equal[True]} digests equal, {equal[False]} not; {changed} changed")
    for size in sorted({row["size"] for row in rows}):
        shares = [row["saved"] / row["updates"] for row in rows if row["size"] == size]
        print(f"{size} samples: {np.mean(shares):.0%} of the updates saved on average")
    return int(equal[False] > 0)


if __name__ == "__main__":
    sys.exit(main())
