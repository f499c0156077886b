"""Shared prefixes: pairs of configs against their ledgers, what a sweep saves, and random kills.

    python benchmarks/prefixes.py FOLDER [--configs 60] [--pairs 500] [--kills 10]

Runs that FOLDER has are not trained again, so the same command continues after an interruption.

1. Random small configs are trained. For random pairs of them, the predicted number of shared updates
   is compared with ledgers and metrics: it must never be larger than the true one.
2. 16 configs that differ in the last 20 % of their updates are trained as a sweep with shared
   prefixes and from scratch: share of the updates, and equal digests.
3. The same sweep is killed with SIGKILL at random moments, and started again until it has finished.
"""

import argparse
import io
import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import phasetrain
from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.fork.first_difference import find_first_difference
from phasetrain.addons.experiments.sweep.jobs import Job
from phasetrain.addons.experiments.sweep.override_text import hash_overrides
from phasetrain.addons.experiments.sweep.shared_prefixes import SharedPrefixes
from phasetrain.app.setup import resolve_config
from phasetrain.runs.ledger import FILE, parse_ledger
from phasetrain.runs.view import read_status
from phasetrain.runtime.terminal import Terminal

BASE = (
    *("MODEL.name=mlp", "DATA.TRAIN.batch_size=32", "DATA.TEST.batch_size=64"),
    *("PHASES.limit.train=6", "PHASES.limit.test=2", "HOOKS.metrics.every_updates=1"),
    *("HOOKS.console=null", "HOOKS.report=null", "RUN.rehearse=false", "RUN.verbosity=quiet"),
    *("MACHINE.threads=1", "DATA.TRAIN.workers=0", "DATA.TEST.workers=0"),
)
LR = "OPTIMIZER.SCHEDULES.lr"
LENGTHS = [["PHASES.epochs=3"], ["PHASES.epochs=3"], ["PHASES.epochs=4"], ["PHASES.updates=20"]]
STAGES = [
    ["PHASES.stages=[{epochs: 2}, {epochs: 1, OPTIMIZER: {lr: 0.02}}]"],
    ["PHASES.stages=[{epochs: 2}, {epochs: 1, OPTIMIZER: {lr: 0.05}}]"],
    ["PHASES.stages=[{epochs: 2}, {epochs: 1, LOSS: {label_smoothing: 0.1}}]"],
    ["PHASES.stages=[{epochs: 2}, {epochs: 2, OPTIMIZER: {SCHEDULES: {lr: linear}}}]"],
]
SCHEDULES = [
    [f"{LR}=constant"],
    [f"{LR}=constant"],
    [f"{LR}=cosine"],
    [f"{LR}={{name: multistep, milestones: [7 updates]}}"],
    [f"{LR}={{name: multistep, milestones: [13 updates], factor: 0.3}}"],
    [f"{LR}={{name: wsd, decay: 0.2}}"],
    [f"{LR}={{name: wsd, decay: 0.4, shape: cosine}}"],
    [f"{LR}={{name: constant, warmup: 4 updates}}"],
    [f"{LR}={{name: step, factor: 0.5, every: 5 updates}}"],
    [
        f"{LR}={{name: composite, parts: [{{name: constant, length: 0.5}}, "
        "{name: linear, length: 0.5}]}"
    ],
]
OTHERS = [
    *([] for _ in range(8)),
    ["PHASES.test_every.updates=4"],
    ["PHASES.test_every.epochs=2"],
    ["PHASES.limit.test=1"],
    ["DATA.TEST.transforms=[{name: noise, std: 0.1}]"],
    ["DATA.TEST.every=end"],
    ["CHECKPOINT.every_updates=5"],
    ["HOOKS.watchdog=null"],
    ["MODEL.swa={start: 0.5, every: 1 updates, test: false}"],
    ["MODEL.swa={start: 0.8, every: 1 updates, test: false}"],
    ["MODEL.ema={decay: 0.9}"],
    ["MODEL.freeze_updates=[{match: layers.1, for: 5}]"],
    ["OPTIMIZER.momentum=0.5"],
    ["OPTIMIZER.lr=0.05"],
    ["HOOKS.early_stopping={monitor: test/accuracy, patience: 1}"],
    ["HOOKS.plateau={monitor: test/accuracy, patience: 1}"],
    ["DATA.TRAIN.transforms=[{name: noise, std: 0.1}]"],
    ["RUN.seed=1"],
]


def draw_config(draw: random.Random) -> list[str]:
    """Return the overrides of a random small config."""
    lengths = draw.choice(LENGTHS)
    if draw.random() < 0.2:
        lengths = draw.choice(STAGES)
    words = [*lengths, *draw.choice(SCHEDULES), *draw.choice(OTHERS)]
    keys = {word.partition("=")[0] for word in words}
    return words + [word for word in draw.choice(OTHERS) if word.partition("=")[0] not in keys]


def train(folder: Path, words: Sequence[str]) -> phasetrain.RunResult:
    """Train or resume a run without output."""
    return phasetrain.run(
        [*BASE, *words, f"RUN.dir={folder}"], terminal=Terminal(io.StringIO(), live=False)
    )


def count_shared(one: Path, other: Path) -> int:
    """Return how many updates two finished runs share, with all lines of metrics.jsonl up to the
    next update."""
    first, second = (parse_ledger((path / FILE).read_bytes()) for path in (one, other))
    shared = 0
    while shared + 1 in first and shared + 1 in second and first[shared + 1] == second[shared + 1]:
        shared += 1
    lines = [_read_lines(path) for path in (one, other)]
    while shared and _until(lines[0], shared) != _until(lines[1], shared):
        shared -= 1
    return shared


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _until(lines: Sequence[Mapping[str, Any]], updates: int) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key != "time"}
        for line in lines
        if line["updates"] <= updates
    ]


def check_pairs(root: Path, configs: int, pairs: int) -> None:
    """Compare predicted and true shared updates of random pairs of random configs."""
    draw = random.Random(0)
    made: dict[str, tuple[Path, ComparedRun]] = {}
    while len(made) < configs:
        words = draw_config(draw)
        name = hash_overrides(words)
        if name in made:
            continue
        folder = root / "pairs" / name
        if read_status(folder).state != "finished":
            train(folder, words)
        setup = resolve_config([*BASE, *words, f"RUN.dir={folder}"])
        made[name] = folder, ComparedRun.open(setup, [run for _, run in made.values()])
    chosen = draw.sample(list(combinations(made.values(), 2)), pairs)
    late = 0
    exact = 0
    lost = 0
    useful = 0
    true = 0
    for (one, first), (other, second) in chosen:
        shared = count_shared(one, other)
        found = find_first_difference(first, second)
        true += shared
        lost += shared - found.updates
        exact += found.updates == shared
        useful += bool(shared)
        if found.updates > shared:
            late += 1
            print(f"TOO LATE: {found} but {shared} in {one} and {other}")
    print(
        f"{len(chosen)} pairs of {configs} configs: {late} forks too late, {exact} exact, "
        f"{len(chosen) - exact - late} earlier than necessary; {useful} pairs share updates, "
        f"{100 * (1 - lost / max(true, 1)):.1f} % of {true} shared updates are found",
        flush=True,
    )


class Sixteen:
    """A sweep of 16 configs that differ in the last 20 % of 100 updates, in one process."""

    fixed = ("PHASES.updates=100", "PHASES.limit.train=20", "RUN.reuse_prefix=true")

    def __init__(self, folder: Path) -> None:
        self.grid = [
            [f"{LR}={{name: wsd, decay: 0.2, end: {end / 20}, shape: {shape}}}"]
            for end in range(8)
            for shape in ("linear", "cosine")
        ]
        folder.mkdir(parents=True, exist_ok=True)
        self.job = Job(("none",), (*BASE, *self.fixed), str(folder), "one")
        self.shared = SharedPrefixes(self.job, self.grid, None, self.launch)
        self.updates = 0

    def launch(self, runs: Sequence[tuple[int, Sequence[str]]], pauses: Mapping[str, int]) -> int:
        """Train runs one after the other."""
        for _, swept in runs:
            folder = Path(self.job.make_record(swept).folder)
            words = [*self.fixed, *swept]
            if folder.name in pauses:
                words.append(f"RUN.pause_at={pauses[folder.name]}")
            done = train(folder, words)
            self.updates += done.updates - read_status(folder).resumed_at
        return 0

    def run(self) -> int:
        """Train what is left, and return the number of updates."""
        places = range(len(self.grid))
        names = [branch.name for branch in self.shared.tree.branches]
        left = [
            place
            for place in places
            if read_status(Path(self.job.folder, names[place])).state != "finished"
        ]
        if left:
            self.shared.write()
            self.shared.run(left)
        return self.updates

    def digests(self) -> list[str]:
        """Return the digest of the weights of each run."""
        folders = [Path(self.job.folder, one.name) for one in self.shared.tree.branches]
        return [read_status(folder).digest for folder in folders]


def check_sixteen(root: Path) -> list[str]:
    """Train 16 runs with and without sharing; return the digests."""
    sweep = Sixteen(root / "sixteen")
    updates = sweep.run()
    digests = sweep.digests()
    for place, words in enumerate(sweep.grid):
        folder = root / "separate" / str(place)
        if read_status(folder).state != "finished":
            train(folder, [*sweep.fixed[:2], *words])
    scratch = [read_status(root / "separate" / str(place)).digest for place in range(16)]
    tree = sweep.shared.tree
    equal = sum(one == other and bool(one) for one, other in zip(digests, scratch, strict=True))
    print(
        f"16 configs: {tree.shared_updates} updates planned and {updates} trained by this command, "
        f"{100 * tree.shared_updates / tree.separate_updates:.1f} % of {tree.separate_updates}; "
        f"{equal} of 16 digests equal those of runs from scratch, {len(set(scratch))} are distinct",
        flush=True,
    )
    return digests


def check_kills(root: Path, kills: int, digests: Sequence[str]) -> None:
    """Kill the sweep at random moments, and compare its tree and digests."""
    draw = random.Random(1)
    folder = root / f"killed-{int(time.time())}"
    context = multiprocessing.get_context("fork")
    done = 0
    while True:
        process = context.Process(target=lambda: Sixteen(folder).run())
        process.start()
        process.join(draw.uniform(1.0, 8.0) if done < kills else None)
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            done += 1
        elif process.exitcode == 0:
            break
    again = Sixteen(folder)
    tree = Sixteen(root / "sixteen").shared.tree
    same = [(one.parent, one.fork) for one in again.shared.tree.branches] == [
        (one.parent, one.fork) for one in tree.branches
    ]
    equal = sum(one == other for one, other in zip(again.digests(), digests, strict=True))
    print(f"{done} kills: the tree is {'the same' if same else 'DIFFERENT'}, {equal} of 16 digests")


def main() -> None:
    """Run the three checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--configs", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("phasetrain").setLevel(logging.ERROR)
    check_pairs(given.folder, given.configs, given.pairs)
    digests = check_sixteen(given.folder)
    check_kills(given.folder, given.kills, digests)


if __name__ == "__main__":
    main()
