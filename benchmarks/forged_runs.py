"""How often `phasetrain verify` catches forged runs, that it accuses no honest run, and what it costs.

    python benchmarks/forged_runs.py [--edited 126] [--forged 100] [--honest 50] [--updates 20000]
        [--folder DIR]

Forged runs claim a training that did not take place: every ledger, chain, manifest and digest is
consistent, as somebody who knows the format would write them.

First, all of a run is verified that was forged in one of the ways below or of forgeries.py, which
edit a finished run or the weights exported from it. None may pass: the exit code of verify is not
0, and neither is the one of this script if one does. Then 5 of 20 segments are verified:

- weights: edited at one update; sample: one sample of one batch is another one; lr: doubled for one
  update. Training continues from there.
- dataset: every image is another one than the config says.
- log: the loss of one update is lower in the ledger, and all hashes and roots are rewritten.

One update is forged in all but `dataset`, so it is caught if its segment is among those that are
trained again: predicted is the share of verified segments. Honest runs are killed at random steps
and resumed, some with other numbers of workers or, with DISTRIBUTED.reduction=ordered, of
processes. The last part trains one longer run and verifies 5 % of it, each in its own process.
Finished runs are kept in --folder, and a second call continues.
"""

import argparse
import io
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forgeries import EDITS, PACK, WEIGHTS, edit_json, edit_promises, rewrite_log

from phasetrain.addons.experiments.verify.segments import choose_segments, list_segments
from phasetrain.addons.experiments.verify.verify import Verification, VerifyOptions, verify
from phasetrain.app.api import run
from phasetrain.checkpoint.commit import list_checkpoints
from phasetrain.engine.batch import Batch
from phasetrain.errors import PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import KillAfter, Killed

WORDS = (
    "experiment=null",
    "DATA.TRAIN={dataset: synthetic, samples: 320, input_shape: [16], classes: 4, batch_size: 8}",
    "DATA.TEST=null",
    "METERS.accuracy=null",
    "MODEL={name: torch.nn.Linear, in_features: 16, out_features: 4}",
    "OPTIMIZER={name: sgd, lr: 0.05, momentum: 0.9}",
    "PHASES.epochs=1",
    "CHECKPOINT.every_updates=2",
    "CHECKPOINT.keep_every.updates=2",
    "HOOKS.console=null",
    "HOOKS.report=null",
    "RUN.rehearse=false",
)
"""A run of 40 updates in 20 segments."""

UPDATES = 40
SEGMENTS = 20
KINDS = ("weights", "sample", "lr", "dataset", "log")

SHORT = "PHASES.limit.train=8"
"""Of the runs that are verified as a whole: 8 updates in 4 segments."""


class Forgery(Hook):
    """Changes the training without a trace in the config or in the records of the run.

    It is called after the ledger has hashed the batch, and claims to observe only.
    """

    observe_only = True

    def __init__(self, kind: str, update: int) -> None:
        self.kind = kind
        self.update = update

    def on_start(self, run: Any) -> None:
        """Watch the optimizer."""
        if self.kind == "lr":
            optimizer = run.task.updater.optimizer

            def scale(factor: float) -> None:
                if run.state.updates + 1 == self.update:
                    for group in optimizer.param_groups:
                        group["lr"] *= factor

            optimizer.register_step_pre_hook(lambda *given: scale(2.0))
            # powers of two are exact: the ledger gets the learning rate of the schedule
            optimizer.register_step_post_hook(lambda *given: scale(0.5))

    def on_batch(self, run: Any, phase: Any, batch: Batch) -> None:
        """Replace samples, which keep their indices."""
        if self.kind == "dataset":
            batch.input.copy_(batch.input.flip(1))
        elif self.kind == "sample" and run.state.updates + 1 == self.update:
            batch.input[0] = batch.input[0].flip(0)

    def on_update(self, run: Any, phase: Any) -> None:
        """Edit a weight."""
        if self.kind == "weights" and run.state.updates + 1 == self.update:
            with torch.no_grad():
                next(run.task.model.parameters()).view(-1)[0] += 1e-3


def train(folder: Path, *words: str, hooks: Mapping[str, Hook] | None = None) -> None:
    """Train the small run without output."""
    terminal = Terminal(io.StringIO(), live=False)
    run([*WORDS, f"RUN.dir={folder}", *words], hooks=hooks, terminal=terminal)


def train_and_kill(folder: Path, step: int, *words: str) -> None:
    """Train until the process would be killed after a step."""
    with suppress(Killed):
        train(folder, *words, hooks={"kill": KillAfter(step)})


def forge(folder: Path, kind: str, update: int) -> None:
    """Make a forged run.

    Args:
        folder: its run folder.
        kind: one of KINDS.
        update: the update that is forged, from 1; of `dataset`, all are.
    """
    if kind == "log":
        original = folder.with_name("original")
        if not (original / "done").exists():
            train(original)
            (original / "done").touch()
        shutil.copytree(original, folder)
        rewrite_log(folder, update)
    else:
        train(folder, hooks={"forgery": Forgery(kind, update)})


def is_caught(folder: Path, seed: int, segments: int) -> tuple[bool, Verification]:
    """Verify random segments of a run; return whether it is accused."""
    found = verify(str(folder), VerifyOptions(segments=segments, seed=seed))
    return found.verdict == "different", found


def forge_change(folder: Path, draw: random.Random) -> Path:
    """Train with another learning rate from some update on, and remove what records the change."""
    shutil.rmtree(folder)
    train(folder, SHORT, f"RUN.pause_at={draw.choice((2, 4, 6))}")
    train(folder, SHORT, "OPTIMIZER.lr=0.01", "RUN.allow=OPTIMIZER.lr")
    edit_json(folder / "environment.json", departures=[])
    edit_promises(folder, lambda promised: promised.update(departures=[]))
    return folder


def forge_longer_plan(folder: Path, draw: random.Random) -> Path:
    """Train longer than the first plan says, and remove what records the change."""
    shutil.rmtree(folder)
    train(folder, f"PHASES.limit.train={draw.choice((4, 6))}")
    train(folder, SHORT, "RUN.allow=PHASES")
    edit_json(folder / "environment.json", departures=[])
    edit_promises(folder, lambda promised: promised.update(departures=[]))
    return folder


def make_trained(kind: str) -> Callable[[Path, random.Random], Path]:
    """Return a function that trains a run with a `Forgery` of this kind."""

    def forge_training(folder: Path, draw: random.Random) -> Path:
        shutil.rmtree(folder)
        train(folder, SHORT, hooks={"forgery": Forgery(kind, draw.randint(1, 8))})
        return folder

    return forge_training


FORGERIES = {
    **{f"training: {kind}": make_trained(kind) for kind in KINDS if kind != "log"},
    "training: change without a record": forge_change,
    "training: longer without a record": forge_longer_plan,
    **EDITS,
}
"""What is forged -> its function, which gets a copy of a finished run and returns what to verify."""


def make_original(folder: Path) -> None:
    """Train a run of 8 updates, and export and pack its weights."""
    from phasetrain.addons.deploy.export import export
    from phasetrain.addons.deploy.pack.pack import pack

    train(folder, SHORT, "MODEL.ema={decay: 0.5}")
    export(str(folder), str(folder / WEIGHTS))
    pack(str(folder), str(folder / PACK))


def judge_forgery(original: Path, folder: Path, kind: str, seed: int) -> tuple[int, str]:
    """Forge a run, and verify all of it.

    Args:
        original: a run of `make_original`.
        folder: becomes the forged run.
        kind: a key of FORGERIES.
        seed: of the details of the forgery.

    Returns:
        The exit code of `phasetrain verify`, and the verdict or the code of the error.
    """
    shutil.copytree(original, folder)
    path = FORGERIES[kind](folder, random.Random(seed))
    try:
        found = verify(str(path), VerifyOptions(fraction=1.0, seed=seed))
    except PhasetrainError as error:
        return error.exit_code, error.code
    return found.exit_code, found.verdict


def count_edited(folder: Path, runs: int) -> int:
    """Forge runs in all ways, verify all of each, print what became of them, and return how many
    passed."""
    original = folder / "whole"
    if not (original / PACK).exists():
        shutil.rmtree(original, ignore_errors=True)
        make_original(original)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in FORGERIES}
    passed = 0
    for number in range(runs):
        kind = list(FORGERIES)[number % len(FORGERIES)]
        with tempfile.TemporaryDirectory() as temporary:
            code, outcome = judge_forgery(original, Path(temporary, "run"), kind, number)
        outcomes[kind][outcome] += 1
        passed += code == 0
    print(f"{'forged, all verified':<52} {'runs':>4}  outcomes")
    for kind, counts in outcomes.items():
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        print(f"{kind:<52} {counts.total():>4}  {text}")
    used = sum(counts.total() > 0 for counts in outcomes.values())
    print(f"{used} kinds: {runs - passed} of {runs} caught")
    return passed


@dataclass
class Tally:
    """Counts of verified runs of one kind."""

    kind: str
    runs: int = 0
    caught: int = 0
    predicted: float = 0.0
    unexplained: int = 0


def count_forged(folder: Path, runs: int, segments: int) -> list[Tally]:
    """Forge runs and verify them.

    A run counts as unexplained if it was caught without its forged segment, or the reverse.
    """
    tallies = {kind: Tally(kind) for kind in KINDS}
    for number in range(runs):
        draw = random.Random(number)
        kind = KINDS[number % len(KINDS)]
        update = draw.randint(1, UPDATES)
        path = folder / f"forged-{number}"
        if not (path / "done").exists():
            forge(path, kind, update)
            (path / "done").touch()
        caught, found = is_caught(path, draw.getrandbits(32), segments)
        expected = any(
            kind == "dataset" or one.first <= update <= one.last for one in found.choice.chosen
        )
        tally = tallies[kind]
        tally.runs += 1
        tally.caught += caught
        tally.predicted += 1.0 if kind == "dataset" else segments / SEGMENTS
        tally.unexplained += caught != expected
    return list(tallies.values())


def make_honest(folder: Path, number: int) -> str:
    """Make an honest run that was interrupted; return its kind."""
    draw = random.Random(number)
    kind = ("killed", "killed twice", "other workers", "paused", "other processes")[number % 5]
    if (folder / "done").exists():
        return kind
    words: Sequence[str] = ()
    if kind == "killed twice":
        train_and_kill(folder, draw.randint(1, 20))
    if kind == "paused":
        train(folder, f"RUN.pause_at={draw.randint(1, UPDATES - 1)}")
    elif kind == "other processes":
        train_on(folder, draw.choice((2, 4)), draw.randint(3, 30))
        words = ("DISTRIBUTED.reduction=ordered",)
    else:
        train_and_kill(folder, draw.randint(1, 39), "DATA.TRAIN.workers=0")
    if kind == "other workers":
        words = (f"DATA.TRAIN.workers={draw.randint(1, 2)}",)
    train(folder, *words)
    (folder / "done").touch()
    return kind


def train_on(folder: Path, processes: int, pause_at: int) -> None:
    """Train the first updates on several processes, with ordered reduction."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "phasetrain", *WORDS, f"RUN.dir={folder}"]
    command += ["DISTRIBUTED.reduction=ordered", f"RUN.pause_at={pause_at}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)


def count_honest(folder: Path, runs: int, segments: int) -> list[Tally]:
    """Make honest runs and verify them."""
    tallies: dict[str, Tally] = {}
    for number in range(runs):
        path = folder / f"honest-{number}"
        kind = make_honest(path, number)
        found = verify(str(path), VerifyOptions(segments=segments, seed=number))
        tally = tallies.setdefault(kind, Tally(kind))
        tally.runs += 1
        tally.caught += found.verdict == "different"
        tally.unexplained += found.verdict == "undecided"
        if found.exit_code != 0:
            print(found.format_text())
    return list(tallies.values())


@dataclass(frozen=True)
class Cost:
    """Seconds of a longer run and of its verification, each a process of its own.

    Attributes:
        share: share of the updates that was trained again.
        run, verify: wall time and CPU time.
        start: CPU time until such a process has imported its modules.
    """

    share: float
    run: tuple[float, float]
    verify: tuple[float, float]
    start: float

    def format_text(self) -> str:
        """Return a line."""
        run_wall, run_cpu = self.run
        wall, cpu = self.verify
        without = (cpu - self.start) / (run_cpu - self.start)
        return (
            f"verified {100 * self.share:.1f} % of the updates for {100 * wall / run_wall:.1f} % of "
            f"the wall time and {100 * cpu / run_cpu:.1f} % of the CPU time ({cpu:.1f} s of "
            f"{run_cpu:.1f} s; {100 * without:.1f} % without the {self.start:.1f} s of imports "
            "in each)"
        )


def measure_cost(folder: Path, updates: int) -> Cost:
    """Train a longer run and verify 5 % of it."""
    every = updates // 20
    path = folder / f"long-{updates}"
    words = [
        f"RUN.dir={path}",
        "MODEL.width=16",
        "DATA.TEST=null",
        "METERS.accuracy=null",
        f"PHASES.updates={updates}",
        f"CHECKPOINT.every_updates={every}",
        f"CHECKPOINT.keep_every.updates={every}",
        "MACHINE.threads=1",
    ]
    kept = folder / f"long-{updates}.json"
    if not kept.exists():
        kept.write_text(json.dumps(time_python("-m", "phasetrain", "train", *words)))
    wall, cpu = json.loads(kept.read_text())
    verified = time_python("-m", "phasetrain", "verify", str(path), "--seed", "1")
    _, start = time_python("-c", "import phasetrain.addons.experiments.verify.verify")
    choice = choose_segments(
        list_segments(list_checkpoints(Storage(), f"{path}/checkpoints")[0], updates), 0.05, None, 1
    )
    share = sum(one.updates for one in choice.chosen) / updates
    return Cost(share, (wall, cpu), verified, start)


def time_python(*words: str) -> tuple[float, float]:
    """Return the wall time and the CPU time of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_forged(tallies: Sequence[Tally]) -> None:
    """Print how many forged runs were caught."""
    print(f"{'forged':<10} {'runs':>5} {'caught':>7} {'predicted':>10} {'unexplained':>12}")
    for one in tallies:
        print(
            f"{one.kind:<10} {one.runs:>5} {one.caught:>7} {one.predicted:>10.1f} "
            f"{one.unexplained:>12}"
        )
    single = [one for one in tallies if one.kind != "dataset"]
    runs = sum(one.runs for one in single)
    caught = sum(one.caught for one in single)
    predicted = sum(one.predicted for one in single)
    share = predicted / runs if runs else 0.0
    spread = math.sqrt(runs * share * (1 - share))
    print(
        f"one update forged: {caught} of {runs} caught, predicted {predicted:.1f} +- {spread:.1f}"
    )


def main() -> int:
    """Make and verify the runs, and print the figures; return 1 if a forged run passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--edited", type=int, default=3 * len(FORGERIES), help="runs to edit")
    parser.add_argument("--forged", type=int, default=100, help="number of forged runs")
    parser.add_argument("--honest", type=int, default=50, help="number of honest runs")
    parser.add_argument("--updates", type=int, default=20_000, help="updates of the longer run")
    parser.add_argument("--segments", type=int, default=5, help=f"verified, of {SEGMENTS}")
    parser.add_argument("--folder", type=Path, help="folder of the runs, to continue later")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.folder or Path(temporary)
        passed = count_edited(folder, flags.edited)
        if flags.forged:
            print_forged(count_forged(folder, flags.forged, flags.segments))
        for one in count_honest(folder, flags.honest, flags.segments):
            print(
                f"honest, {one.kind}: {one.caught} of {one.runs} accused, "
                f"{one.unexplained} undecided"
            )
        if flags.updates:
            print(measure_cost(folder, flags.updates).format_text())
    return int(passed > 0)


if __name__ == "__main__":
    sys.exit(main())
