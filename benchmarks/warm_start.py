"""Warm starts of small runs: the bits of new processes, and the CPU time of a sweep.

    python benchmarks/warm_start.py FOLDER [--runs 100] [--sweeps 1]

Runs that FOLDER has are not trained again, so the same command continues after an interruption.

1. Short runs of three tasks (images, text, self-supervised images) with different seeds, learning
   rates and numbers of threads are trained twice: in a new process each, whose hashes have random
   seeds, and as forks of one warm parent. The digests of weights, ledger and metrics have to be
   equal.
2. A sweep of 12 runs with 22 updates each, with and without warm starts in turn: CPU seconds of all
   processes.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

from phasetrain.addons.experiments.warm.start import SWITCH, start_process
from phasetrain.runs.ledger import FILE
from phasetrain.runs.view import read_status
from phasetrain.runtime.child_processes import COMMAND

TASKS = ("digits", "text_tiny", "digits_simclr")
LIMITS = ("PHASES.epochs=1", "PHASES.limit.train=6", "PHASES.limit.test=2")
QUIET = ("RUN.rehearse=false", "RUN.verbosity=quiet", "HOOKS.report=null")
SWEEP = ("OPTIMIZER.lr=0.1,0.03,0.01,0.3", "MODEL.width=8,16,32", "PHASES.epochs=1")


def list_words(number: int) -> list[str]:
    """Return the overrides of a run: each number has another task, seed, rate or thread count."""
    rate = (0.1, 0.03, 0.01)[number // 3 % 3]
    threads = ("1", "2", "null")[number // 9 % 3]
    words = [f"RUN.seed={number}", f"OPTIMIZER.lr={rate}", f"MACHINE.threads={threads}"]
    return [f"experiment={TASKS[number % 3]}", *words, *LIMITS, *QUIET]


def train(folder: Path, number: int, *, warm: bool) -> list[str]:
    """Train a run unless it has finished, and return its digests."""
    run = folder / ("warm" if warm else "new") / str(number)
    if read_status(run).state != "finished":
        run.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, SWITCH: str(int(warm))}
        with open(f"{run}.log", "wb") as output:
            words = [*COMMAND, *list_words(number), f"RUN.dir={run.absolute()}"]
            code = start_process(words, environment, output=output).wait()
        if code:
            raise SystemExit(f"{run}.log: exit code {code}")
    metrics = [
        json.loads(line)["metrics"]
        for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()
        if json.loads(line).get("kind") == "phase"
    ]
    return [
        read_status(run).digest or "",
        hashlib.sha256((run / FILE).read_bytes()).hexdigest(),
        json.dumps([{k: v for k, v in one.items() if "time" not in k} for one in metrics]),
    ]


def compare_runs(folder: Path, runs: int) -> None:
    """Train each run in both ways, and print how many are equal."""
    equal = 0
    for number in range(runs):
        new, warm = (train(folder, number, warm=warm) for warm in (False, True))
        equal += new == warm
        if new != warm:
            sys.stdout.write(f"run {number} differs: {new} {warm}\n")
    sys.stdout.write(f"{equal} of {runs} runs of {len(TASKS)} tasks are equal\n")


def measure_sweep(folder: Path, *, warm: bool) -> float:
    """Return the CPU seconds of a sweep, with all of its processes."""
    shutil.rmtree(folder / "sweep", ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*COMMAND, "sweep", *SWEEP, f"hydra.sweep.dir={folder / 'sweep'}"],
        env={**os.environ, SWITCH: str(int(warm))},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Compare, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--sweeps", type=int, default=1)
    flags = parser.parse_args()
    compare_runs(flags.folder, flags.runs)
    seconds = [
        [measure_sweep(flags.folder, warm=warm) for warm in (False, True)]
        for _ in range(flags.sweeps)
    ]
    for name, values in zip(
        ("new processes", "warm starts"), zip(*seconds, strict=True), strict=False
    ):
        sys.stdout.write(f"sweep of 12 runs, {name}: {median(values):.1f} s of CPU\n")


if __name__ == "__main__":
    main()
