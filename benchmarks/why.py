"""Plants poisoned samples and learning-rate spikes, and checks that `phasetrain why` finds them.

    python benchmarks/why.py --samples 50 --rates 50 --clean 20 --out why.jsonl

Three tasks (images, a table, text), short runs. A sample gets wrong targets, extreme values or
noise; a hook raises the learning rate of one update. `phasetrain why` looks for the highest
spike and its cause, with the default budget. A run that is in the file already is not repeated, so
a killed benchmark continues. The exit code is 1 if a target is missed.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from time_travel import hash_folder
from what_if import QUIET

from phasetrain.addons.experiments.options import WhyOptions
from phasetrain.addons.experiments.travel.order import SampleOrder
from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.why import explain_spike
from phasetrain.addons.libraries.scikit_learn import load_sklearn
from phasetrain.addons.text.blocks import load_alice
from phasetrain.app.api import run
from phasetrain.data.datasets.digits import load_digits
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.runtime.machine import seed_of
from phasetrain.runtime.terminal import Terminal

UPDATES = 200
COMMON = (
    *QUIET,
    "PHASES.epochs=null",
    f"PHASES.updates={UPDATES}",
    "CHECKPOINT.every_updates=5",
    "CHECKPOINT.keep_every.updates=5",
)
TASKS = {
    "digits": (
        *("MODEL.name=small_cnn", "MODEL.width=8", "DATA.TRAIN.batch_size=32", "OPTIMIZER.lr=0.1"),
        *("DATA.TRAIN.transforms=[{name: noise, std: 0.05}]", "DATA.TEST=null"),
    ),
    "table": (
        *("experiment=tabular_regression", "DATA.TRAIN.batch_size=16", "DATA.TEST=null"),
        "PHASES.test_every.epochs=null",
    ),
    "text": (
        *("experiment=text_tiny", "DATA.TRAIN.batch_size=4", "DATA.TRAIN.context=32"),
        *("MODEL.width=32", "MODEL.depth=1", "DATA.TEST=null"),
    ),
}
PLANTED = (
    *(("digits", "noise"), ("table", "target"), ("text", "target")),
    *(("digits", "extreme"), ("table", "extreme"), ("text", "target")),
)
"""Task, and how a sample is poisoned, in turn: noise instead of the image, a wrong target, or values
a thousand times as large."""

RATES = {"digits": 5.0, "table": 3.0, "text": 2.0}
"""Planted learning rate, hundreds of times the usual one."""

SEEDS = 20


def load_poisoned(
    task: str,
    sample: int,
    kind: str,
    data: str = "diabetes",
    folds: int = 5,
    fold: int = 0,
    context: int = 32,
) -> Any:
    """Load the training data of a task, with one sample that is wrong."""
    loaded: Any
    if task == "digits":
        loaded = load_digits()
    elif task == "table":
        loaded = load_sklearn(data, folds=folds, fold=fold)
    else:
        loaded = load_alice(context=context)
    generator = torch.Generator().manual_seed(sample)
    inputs, targets = loaded.inputs, loaded.targets
    if kind == "extreme":
        inputs[sample] = inputs[sample] * 1000
    elif kind == "noise":
        inputs[sample] = 100 * torch.randn(inputs[sample].shape, generator=generator)
    elif task == "text":
        targets[sample] = torch.randint(128, 256, targets[sample].shape, generator=generator)
    else:
        targets[sample] = 20
    return loaded


class Jump(Hook):
    """Changes the learning rate of one update.

    Args:
        update: the update.
        lr: its learning rate.
    """

    def __init__(self, update: int, lr: float) -> None:
        self.update = update
        self.lr = lr

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Change it after the schedule has set it."""
        if run.state.updates + 1 == self.update:
            for group in run.task.updater.optimizer.param_groups:
                group["lr"] = self.lr


def train(folder: Path, *words: str) -> None:
    """Train a run."""
    shutil.rmtree(folder, ignore_errors=True)
    run([*words, *COMMON, f"RUN.dir={folder}"], terminal=Terminal(io.StringIO(), live=False))


def ask(folder: Path) -> dict[str, Any]:
    """Ask for the cause of the highest spike of a run."""
    content = explain_spike(str(folder), WhyOptions(trust=True))
    cost = content["cost"]
    return {
        "cause": "none" if content["goal"] is None else content["cause"] or "neither",
        "cause_update": content["cause_update"],
        "samples": [sample["id"] for sample in content["samples"]],
        "cost": cost["replayed"] + cost["trained"],
        "answer": content["answer"],
    }


def plant(folder: Path, kind: str, number: int) -> tuple[Path, dict[str, Any]]:
    """Train a run with something planted, and return it with the truth."""
    generator = np.random.default_rng(seed_of(0, "why", kind, number))
    seed = number % SEEDS
    update = int(generator.integers(UPDATES // 2, UPDATES - 10))
    task, how = PLANTED[number % len(PLANTED)]
    if kind != "sample":
        task, how = list(TASKS)[number % len(TASKS)], ""
    words = [*TASKS[task], f"RUN.seed={seed}"]
    truth: dict[str, Any] = {"cause": "none"}
    if kind == "rate":
        words.append(f"+HOOKS.jump={{name: why.Jump, update: {update}, lr: {RATES[task]}}}")
        truth = {"cause": "learning_rate", "update": update}
    elif kind == "sample":
        # The order is that of a run of the same seed and the same number of samples.
        plain = folder / f"order-{task}-{seed}"
        if not plain.exists():
            train(plain, *words, "RUN.pause_at=1")
        with open_past_run(str(plain)) as past:
            ids = SampleOrder(past).list_updates(update, update).list_column("sample")
        sample = int(generator.choice(ids))
        words += [
            *("DATA.TRAIN.dataset=why.load_poisoned", f"DATA.TRAIN.task={task}"),
            *(f"DATA.TRAIN.sample={sample}", f"DATA.TRAIN.kind={how}"),
        ]
        truth = {"cause": "sample", "update": update, "sample": sample}
    past_run = folder / f"{kind}-{number}"
    train(past_run, *words)
    return past_run, {"kind": kind, "task": task, "how": how, "truth": truth}


def check(folder: Path, kind: str, number: int) -> dict[str, Any]:
    """Return the answer for a run with something planted, next to the truth."""
    past_run, planted = plant(folder, kind, number)
    given = ask(past_run)
    shutil.rmtree(past_run)
    return {"name": past_run.name, **planted, **given}


def check_kills(folder: Path, kills: int, seconds: float) -> bool:
    """Kill the command at random moments, print the figures, and return whether nothing was changed
    and the command then succeeds."""
    past_run, planted = plant(folder, "sample", 0)
    before = hash_folder(past_run)
    answers = Path(f"{past_run}-why")
    words = [sys.executable, "-m", "phasetrain", "why", str(past_run), "--trust", "--json"]
    generator = np.random.default_rng(seed_of(0, "kill"))
    killed = untouched = 0
    for _ in range(kills):
        shutil.rmtree(answers, ignore_errors=True)
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                process.wait(timeout=float(generator.uniform(1, seconds)))
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
        is_whole = all(json.loads(path.read_text())["cause"] for path in answers.glob("*.json"))
        untouched += hash_folder(past_run) == before and is_whole
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    [sample] = json.loads(done.stdout)["samples"]
    is_right = sample["id"] == planted["truth"]["sample"]
    print(
        f"kill: {killed} of {kills} commands were killed, {untouched} of {kills} changed nothing; "
        f"the next one was {'right' if is_right else 'WRONG'}"
    )
    return untouched == kills and is_right


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether the class of the cause is right."""
    return bool(row["cause"] == row["truth"]["cause"])


def main() -> int:
    """Check all runs that are not in the file yet, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=50, help="runs with a poisoned sample")
    parser.add_argument("--rates", type=int, default=50, help="runs with a learning-rate spike")
    parser.add_argument("--clean", type=int, default=20, help="runs without any")
    parser.add_argument("--kills", type=int, default=10, help="commands to kill")
    parser.add_argument("--seconds", type=float, default=10, help="latest moment of a kill")
    parser.add_argument("--out", type=Path, default=Path("why.jsonl"))
    flags = parser.parse_args()
    counts = {"clean": flags.clean, "sample": flags.samples, "rate": flags.rates}
    rows: list[dict[str, Any]] = []
    if flags.out.exists():
        rows = [json.loads(line) for line in flags.out.read_text().splitlines()]
    done = {row["name"] for row in rows}
    with tempfile.TemporaryDirectory(prefix="why-") as scratch, flags.out.open("a") as out:
        for kind, count in counts.items():
            for number in range(count):
                if f"{kind}-{number}" in done:
                    continue
                row = check(Path(scratch), kind, number)
                rows.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                if not is_right(row):
                    print(json.dumps(row))
        is_safe = not flags.kills or check_kills(Path(scratch), flags.kills, flags.seconds)
    return max(report(rows), int(not is_safe))


def report(rows: list[dict[str, Any]]) -> int:
    """Print the figures, and return whether a target is missed."""
    groups = dict.fromkeys((row["kind"], row["task"], row["how"]) for row in rows)
    for group in groups:
        chosen = [row for row in rows if (row["kind"], row["task"], row["how"]) == group]
        exact = sum(row["samples"] == [row["truth"].get("sample")] for row in chosen)
        line = f"{' '.join(group)}: class right in {sum(map(is_right, chosen))} of {len(chosen)}"
        if group[0] == "sample":
            line += f", exact sample in {exact}"
        print(line)
    planted = [row for row in rows if row["kind"] != "clean"]
    samples = [row for row in rows if row["kind"] == "sample"]
    clean = [row for row in rows if row["kind"] == "clean"]
    right = sum(map(is_right, planted))
    exact = sum(row["samples"] == [row["truth"]["sample"]] for row in samples)
    invented = sum(not is_right(row) for row in clean)
    costs = [100 * row["cost"] / UPDATES for row in planted]
    print(
        f"class right in {right} of {len(planted)}, exact sample in {exact} of {len(samples)}, a "
        f"spike invented in {invented} of {len(clean)} clean runs"
    )
    if costs:
        print(f"cost: median {median(costs):.1f} %, at most {max(costs):.1f} % of the run")
    targets = (
        right >= 0.95 * len(planted),
        exact >= 0.9 * len(samples),
        not invented,
        max(costs, default=0) <= 10,
    )
    return int(not all(targets))


if __name__ == "__main__":
    raise SystemExit(main())
