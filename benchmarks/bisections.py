"""Checks that planted regressions are found by `phasetrain bisect`.

    python benchmarks/bisections.py --out bisections.jsonl

20 pairs of configs differ in 1 to 3 planted key changes and in 8 to 15 harmless ones. In 16 pairs
bits decide: the planted keys change the weights, the others do not. In 4 pairs the metric decides:
the planted key ruins the accuracy, and others change the weights, too; in 2 of them a second key
alone ruins it as well, and both have to be found. 10 repositories of a small project have 12
commits each, one with a planted change; in 5 of them some commits do not run, and in 2 others change
the weights and the metric decides. A case is right if exactly what was planted is found, and if no
worktree and no run of a candidate is left. Finished cases are in the file, and are not repeated. The
exit code is 1 if a case is wrong.
"""

import argparse
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phasetrain.addons.experiments.bisect.bisect import Bisection, bisect
from phasetrain.addons.experiments.judge.contenders import FACTS
from phasetrain.addons.experiments.judge.facts import main as write_facts
from phasetrain.addons.experiments.judge.processes import WorkingFolder
from phasetrain.addons.experiments.options import BisectOptions
from phasetrain.app.setup import resolve_config
from phasetrain.cli import main as main_of_cli
from phasetrain.runtime.machine import seed_of
from phasetrain.runtime.terminal import Terminal

TASKS = {
    "digits": (
        "digits",
        "MODEL.width=8",
        "PHASES.epochs=2",
        "HOOKS.report=null",
        "RUN.rehearse=false",
    ),
    "tabular": ("tabular", "PHASES.epochs=4", "HOOKS.report=null", "RUN.rehearse=false"),
    "text": ("text_tiny", "PHASES.epochs=1", "HOOKS.report=null", "RUN.rehearse=false"),
}
HARMLESS = (
    "OPTIMIZER.clip_value=1e9",
    "OPTIMIZER.on_nonfinite=ignore",
    "DATA.TRAIN.subset.seed=3",
    "DATA.TEST.subset.seed=4",
    "DATA.TEST.batch_size=100",
    "DATA.TEST.exact=false",
    "PHASES.limit.test=3",
    "PHASES.test_every.epochs=2",
    "PHASES.train_meters=false",
    "PHASES.overfit=null",
    "DISTRIBUTED.sync_batch_norm=true",
    "DISTRIBUTED.virtual_shards=4",
    "METERS.second={name: loss}",
    "CHECKPOINT.every_updates=7",
    "CHECKPOINT.keep_last=2",
    "DATA.TRAIN.exact=false",
)
"""Changes that change no weights within a few updates."""

CHANGING = {
    "digits": (
        *("OPTIMIZER.lr=0.05", "OPTIMIZER.momentum=0.8", "OPTIMIZER.nesterov=false"),
        *("OPTIMIZER.weight_decay=0.01", "MODEL.dropout=0.3", "MODEL.width=6"),
        *("DATA.TRAIN.batch_size=48", "DATA.TRAIN.transforms=[]"),
    ),
    "tabular": (
        *("OPTIMIZER.lr=0.01", "OPTIMIZER.eps=1e-3", "OPTIMIZER.weight_decay=0.5"),
        *("MODEL.hidden=[32, 32]", "MODEL.dropout=0", "DATA.TRAIN.batch_size=24"),
        *("DATA.TRAIN.fold=1", "OPTIMIZER.accumulate=2"),
    ),
    "text": (
        *("OPTIMIZER.lr=0.01", "OPTIMIZER.eps=1e-3", "OPTIMIZER.weight_decay=0.5"),
        *("MODEL.width=32", "MODEL.depth=1", "MODEL.heads=2", "OPTIMIZER.clip_norm=0.1"),
    ),
}
"""Changes of the weights, by task."""

NEUTRAL = {
    "digits": ("OPTIMIZER.momentum=0.89", "MODEL.dropout=0.11", "OPTIMIZER.weight_decay=1e-6"),
    "tabular": ("OPTIMIZER.eps=1e-7", "MODEL.dropout=0.21", "DATA.TRAIN.batch_size=31"),
}
"""Changes of the weights that hardly change the accuracy."""

RUINING = {
    "digits": ("OPTIMIZER.lr=1e-6", "MODEL.dropout=0.995"),
    "tabular": ("OPTIMIZER.lr=1e-7", "MODEL.dropout=0.995"),
}
"""Changes that ruin the accuracy, each of them alone."""

NET = """from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 24)
        self.out = nn.Linear(24, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.hidden(images.flatten(1)).relu())
"""
EXPERIMENT = """# @package _global_
defaults:
  - /experiment/digits
  - _self_
MODEL:
  name: net.Net
PHASES:
  epochs: 2
HOOKS:
  report: null
OPTIMIZER:
  lr: 0.1
"""
PLANTED_CODE = (
    ("net.py", ".relu()", ".tanh()"),
    ("net.py", "self.out(self", "self.out(0.9 * self"),
    ("net.py", "nn.Linear(24, classes)", "nn.Linear(24, classes, bias=False)"),
    ("wide.yaml", "lr: 0.1", "lr: 0.02"),
)
RUINING_CODE = ("net.py", "images.flatten(1)", "images.flatten(1) * 0")
NEUTRAL_CODE = ("net.py", ".relu()", ".mul(1.001).relu()")
BROKEN_CODE = (
    ("net.py", "import Tensor, nn", "import Tensor, nn, missing_name"),
    ("net.py", "def forward(self, images", "def forward(self, , images"),
    ("wide.yaml", "  lr: 0.1", "  lrr: 0.1"),
)
COMMITS = 12
MEASURED_FROM = 16
"""Number of pairs of configs about which bits decide."""


def launch_fork(
    words: Sequence[str], working_folder: WorkingFolder, output: Path, **how: object
) -> int:
    """Run a module in a fork of this process, which has imported torch and trains nothing itself:
    a new process takes longer to import it than a short run takes."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.chdir(working_folder.path)
        sys.path[:0] = working_folder.search_path
        with output.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = write_facts(words[1:]) if words[0] == FACTS else main_of_cli(words[1:])
    finally:
        if sys.exception() is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_modules() -> None:
    """Import what runs import: each fork would do it again, in most of its time."""
    importlib.import_module("phasetrain.app.train.training")
    importlib.import_module("torch._dynamo")
    for experiment, *words in TASKS.values():
        terminal = Terminal(io.StringIO(), live=False)
        setup = resolve_config([f"experiment={experiment}", *words], terminal=terminal)
        setup.builder().data()


def key_of(word: str) -> str:
    """Return the key of an override."""
    return word.partition("=")[0]


def find_keys(done: Bisection) -> list[list[str]]:
    """Return the keys of each cause, in alphabetic order."""
    return sorted(sorted(each["key"] for each in cause) for cause in done.causes)


def run_config_case(number: int) -> tuple[Any, Any, Bisection]:
    """Return what was planted, what was found, and the answer."""
    generator = np.random.default_rng(seed_of(0, "config", number))
    by_metric = number >= MEASURED_FROM
    task = ["digits", "tabular"][number % 2] if by_metric else list(TASKS)[number % 3]
    experiment, *words = TASKS[task]
    count = int(generator.integers(8, 16))
    harmless = generator.permutation(HARMLESS)[:count].tolist()
    if by_metric:
        planted = generator.permutation(RUINING[task])[: 1 + number % 4 // 2].tolist()
        expected = sorted([key_of(word)] for word in planted)
        keys = set(map(key_of, planted))
        harmless += [word for word in NEUTRAL[task] if key_of(word) not in keys]
        # It changes what is measured.
        harmless = [word for word in harmless if not word.startswith("PHASES.limit")]
    else:
        planted = generator.permutation(CHANGING[task])[: 1 + number % 3].tolist()
        expected = [sorted(map(key_of, planted))]
    changes = generator.permutation([*planted, *harmless]).tolist()
    bad = " ".join([experiment, *(json.dumps(word) if " " in word else word for word in changes)])
    options = BisectOptions(is_bits=not by_metric, short=4)
    done = bisect([experiment, bad, *words], options, launch=launch_fork)
    return expected, find_keys(done), done


def git(*words: str) -> str:
    """Run git, and return its output."""
    flags = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *flags, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def edit(file: str, old: str, new: str) -> None:
    """Replace a text in a file."""
    text = Path(file).read_text()
    assert old in text, (file, old)
    Path(file).write_text(text.replace(old, new))


def make_project(number: int) -> str:
    """Make a repository in the working directory, and return the planted commit."""
    generator = np.random.default_rng(seed_of(0, "commits", number))
    planted_at = int(generator.integers(2, COMMITS - 1))
    git("init", "-q", "-b", "main")
    Path(".gitignore").write_text("runs/\n__pycache__/\n")
    Path("net.py").write_text(NET)
    Path("wide.yaml").write_text(EXPERIMENT)
    git("add", "-A")
    git("commit", "-q", "-m", "start")
    git("tag", "start")
    by_metric = number >= 8
    free = [at for at in range(1, COMMITS) if at not in (planted_at, planted_at - 1)]
    broken: list[int] = []
    if number % 2:
        broken = generator.permutation(free)[: int(generator.integers(1, 4))].tolist()
    neutral_at = next(at for at in free if at not in broken)
    planted = ""
    for at in range(1, COMMITS + 1):
        undo = []
        Path("README.md").write_text(f"version {at}\n")
        edit("net.py", "from torch", f"# change {at}\nfrom torch")
        if at == planted_at:
            edit(*(RUINING_CODE if by_metric else PLANTED_CODE[number % len(PLANTED_CODE)]))
        elif by_metric and at == neutral_at:
            edit(*NEUTRAL_CODE)
        if at in broken:
            file, old, new = BROKEN_CODE[at % len(BROKEN_CODE)]
            if old in Path(file).read_text():
                edit(file, old, new)
                undo.append((file, new, old))
        git("commit", "-q", "-a", "-m", f"change {at}", "--allow-empty")
        if at == planted_at:
            planted = git("rev-parse", "HEAD")
        for words in undo:
            edit(*words)
    return planted


def run_commit_case(number: int) -> tuple[Any, Any, Bisection]:
    """Return what was planted, what was found, and the answer."""
    with tempfile.TemporaryDirectory(prefix="bisections-") as folder:
        here = Path.cwd()
        os.chdir(folder)
        try:
            planted = make_project(number)
            options = BisectOptions(range="start..main", is_bits=number < 8, short=4)
            done = bisect(
                ["wide.yaml", "RUN.rehearse=false"],
                options,
                launch=launch_fork,
            )
            assert len(git("worktree", "list").splitlines()) == 1
        finally:
            os.chdir(here)
    return [planted], [each["commit"] for each in done.causes[0]], done


def main() -> int:
    """Run all cases that are not in the file yet, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bisections.jsonl"))
    parser.add_argument("--only", nargs="+", help="names of cases, such as config-3")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    import_modules()
    out = flags.out.absolute()
    rows = []
    if out.exists():
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    finished = {row["name"] for row in rows}
    cases = [("config", number) for number in range(20)]
    cases[MEASURED_FROM:MEASURED_FROM] = [("commit", number) for number in range(10)]
    os.chdir(tempfile.mkdtemp(prefix="bisections-"))
    for kind, number in cases:
        name = f"{kind}-{number}"
        if name in finished or (flags.only and name not in flags.only):
            continue
        began = time.perf_counter()
        run = run_config_case if kind == "config" else run_commit_case
        expected, found, done = run(number)
        row = {
            "name": name,
            "right": expected == found and done.is_certain,
            "expected": expected,
            "found": found,
            "by": done.by,
            "suspects": done.suspects,
            "verdicts": done.decided,
            "skipped": len(done.undecided),
            "runs": done.runs,
            "seconds": round(time.perf_counter() - began),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
        shutil.rmtree("runs", ignore_errors=True)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(
        "\n| cases | decided by | suspects | verdicts | runs | found |\n|---|---|---|---|---|---|"
    )
    for kind, by in sorted({(row["name"].split("-")[0], row["by"]) for row in rows}, reverse=True):
        chosen = [row for row in rows if row["name"].startswith(kind) and row["by"] == by]
        ranges = [
            f"{min(row[name] for row in chosen)} to {max(row[name] for row in chosen)}"
            for name in ("suspects", "verdicts", "runs")
        ]
        right = sum(row["right"] for row in chosen)
        print(f"| {kind} | {by} | {' | '.join(ranges)} | {right} of {len(chosen)} |")
    right = sum(row["right"] for row in rows)
    print(f"\n{right} of {len(rows)} planted regressions were found")
    return int(right != len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
