"""Microseconds per iteration that phasetrain adds to a bare loop.

    python benchmarks/overhead.py [--repetitions 60] [--updates 500] [--hooks 12] [--json FILE]

Model, data and optimizer are the same and as small as possible (Linear 16 to 16, batches of 8 from
memory, fused SGD), to measure the loop rather than the arithmetic. All exactness guarantees are on:
deterministic kernels and seeding of every step. The variants take turns in one process on one
thread. The output shows medians; the cost above bare is the median of the differences within a
repetition, so that a slow moment of the machine affects both sides. CPU time is less disturbed by
other programs; the wall clock is shown as well. `calls` are calls of Python functions per
iteration, torch's included, counted exactly in the first turn. `by hand` is what (b) does, written
into the loop.

Finally, all default hooks together are measured on a small real model: a ResNet-20 for 32 x 32
images in batches of 64, with a test, a live terminal and a run folder.
"""

import argparse
import gc
import io
import json
import logging
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from types import FrameType

import torch
from torch.nn.functional import cross_entropy

from phasetrain.app.build_hooks import build_hooks
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hook, Hooks
from phasetrain.hooks.ledger import LedgerHook
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.progress.console import ConsoleView
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder

FEATURES, BATCH, STEPS_PER_EPOCH = 16, 8, 250

PLAIN = (
    "DATA.TRAIN.dataset=synthetic",
    f"DATA.TRAIN.samples={BATCH * STEPS_PER_EPOCH}",
    f"DATA.TRAIN.input_shape=[{FEATURES}]",
    f"DATA.TRAIN.classes={FEATURES}",
    f"DATA.TRAIN.batch_size={BATCH}",
    "DATA.TRAIN.transforms=[]",
    "DATA.TEST=null",
    "MODEL.name=torch.nn.Linear",
    f"MODEL.in_features={FEATURES}",
    f"MODEL.out_features={FEATURES}",
    "LOSS.name=cross_entropy",
    "OPTIMIZER.name=sgd",
    "OPTIMIZER.lr=0.01",
    "OPTIMIZER.momentum=0.9",
    "OPTIMIZER.nesterov=false",
    "OPTIMIZER.SCHEDULES=null",
    "METERS=null",
    "MACHINE.threads=1",
    "MACHINE.deterministic=true",
    "OPTIMIZER.on_nonfinite=ignore",
)
GUARDED = (*PLAIN, "OPTIMIZER.on_nonfinite=stop")
FULL = (*GUARDED, "METERS={accuracy: {}, loss: null}", "OPTIMIZER.SCHEDULES={lr: {name: cosine}}")

PICTURES, RESNET_STEPS = 64, 10
RESNET = (
    "DATA.TRAIN.dataset=synthetic",
    f"DATA.TRAIN.samples={PICTURES * RESNET_STEPS}",
    "DATA.TRAIN.input_shape=[3,32,32]",
    f"DATA.TRAIN.batch_size={PICTURES}",
    "DATA.TRAIN.transforms=[]",
    f"DATA.TEST={{dataset: synthetic, samples: {PICTURES}, input_shape: [3,32,32], transforms: []}}",
    f"DATA.TEST.batch_size={PICTURES}",
    "MODEL=resnet20",
    "PHASES.epochs=1",
    "MACHINE.threads=1",
)

Trial = Callable[[], "Taken"]


class NullTerminal(io.TextIOBase):
    """An invisible terminal; rich renders to it as to any other."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@dataclass(frozen=True)
class Taken:
    """Seconds of one trial: CPU time of all threads, and wall clock."""

    cpu: float
    wall: float


@contextmanager
def stopwatch() -> Iterator[list[Taken]]:
    """Yield a list that holds the time taken once the block has ended."""
    found: list[Taken] = []
    cpu, wall = time.process_time(), time.perf_counter()
    yield found
    found.append(Taken(time.process_time() - cpu, time.perf_counter() - wall))


def count_calls(trial: Trial) -> int:
    """Return the number of calls of Python functions in a trial."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        trial()
    finally:
        sys.setprofile(None)
    return calls


@dataclass(frozen=True)
class Row:
    """Microseconds per iteration of one variant; `above` is the cost over the bare loop."""

    name: str
    wall: float
    cpu: float
    above: float
    above_low: float
    above_high: float
    ratio: float
    calls: float


def bare(updates: int) -> Trial:
    """Return a hand-written loop."""
    setup = _settled(PLAIN, updates)
    data = Builder(setup.config, setup.machine, setup.world).data()["train"].reader.dataset
    inputs, targets = data.inputs, data.targets
    model = torch.nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def trial() -> Taken:
        with stopwatch() as taken:
            model.train()
            for _ in range(updates // STEPS_PER_EPOCH):
                order = torch.randperm(len(targets))
                for step in range(STEPS_PER_EPOCH):
                    chosen = order[step * BATCH : (step + 1) * BATCH]
                    loss = cross_entropy(model(inputs[chosen]), targets[chosen])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return taken[0]

    return trial


def by_hand(updates: int, folder: Path) -> Trial:
    """Return the bare loop with a check of the gradients, a schedule, accuracy and mean loss, and
    a file with the loss of every tenth update."""
    setup = _settled(PLAIN, updates)
    data = Builder(setup.config, setup.machine, setup.world).data()["train"].reader.dataset
    inputs, targets = data.inputs, data.targets
    model = torch.nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    weights = list(model.parameters())

    def trial() -> Taken:
        with stopwatch() as taken, (folder / "losses.jsonl").open("w") as file:
            model.train()
            update = 0
            for _ in range(updates // STEPS_PER_EPOCH):
                order = torch.randperm(len(targets))
                right, total = torch.zeros(()), torch.zeros(())
                for step in range(STEPS_PER_EPOCH):
                    lr = 0.005 * (1 + math.cos(math.pi * update / updates))
                    optimizer.param_groups[0]["lr"] = lr
                    chosen = order[step * BATCH : (step + 1) * BATCH]
                    output, target = model(inputs[chosen]), targets[chosen]
                    loss = cross_entropy(output, target)
                    loss.backward()
                    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
                    if not torch.isfinite(norm):
                        raise FloatingPointError(f"update {update}")
                    optimizer.step()
                    optimizer.zero_grad()
                    right += (output.detach().argmax(1) == target).sum()
                    total += loss.detach()
                    update += 1
                    if update % 10 == 0:
                        file.write(json.dumps({"update": update, "loss": loss.item()}) + "\n")
                right.item(), total.item()
        return taken[0]

    return trial


def framework(
    overrides: tuple[str, ...],
    updates: int,
    folder: Path | None = None,
    hooks: Callable[[], Mapping[str, Hook]] = dict,
) -> Trial:
    """Return the same training built from config, builder, plan, task and engine."""
    setup = _settled(overrides, updates)
    builder = Builder(setup.config, setup.machine, setup.world)
    data = builder.data()
    plan = builder.plan(data)
    task = builder.task(builder.parts(data, plan))
    run_folder = None if folder is None else RunFolder(str(folder))

    def trial() -> Taken:
        engine = PhaseEngine(
            task, plan, RunState(), Hooks(hooks()), folder=run_folder, world=setup.world
        )
        with setup.machine.apply_settings(), stopwatch() as taken:
            engine.run()
        assert engine.state.updates == updates
        return taken[0]

    return trial


def default_hooks(folder: Path) -> dict[str, Trial]:
    """Return an epoch and a test of the small real model, without and with default hooks."""
    folder.mkdir()
    terminal = Terminal(NullTerminal(), live=True)
    setup = resolve_config([*RESNET, f"RUN.dir={folder}"], terminal=terminal)
    builder = Builder(setup.config, setup.machine, setup.world)
    data = builder.data()
    plan = builder.plan(data)
    task = builder.task(builder.parts(data, plan))

    def trial(hooks: Callable[[], Mapping[str, Hook]]) -> Taken:
        engine = PhaseEngine(
            task, plan, RunState(), Hooks(hooks()), folder=RunFolder(str(folder)), world=setup.world
        )
        with setup.machine.apply_settings(), stopwatch() as taken:
            engine.run()
        return taken[0]

    return {
        "without hooks": lambda: trial(dict),
        "with all default hooks": lambda: trial(lambda: build_hooks(setup)),
    }


def share_of_hooks(trials: Mapping[str, Trial], repetitions: int) -> tuple[float, float, float]:
    """Return seconds per step without hooks, and median and upper quartile of their share."""
    taken: dict[str, list[float]] = {name: [] for name in trials}
    for turn in range(repetitions + 1):
        for name, trial in trials.items():
            gc.collect()
            found = trial().cpu
            if turn:
                taken[name].append(found)
    without, with_them = taken.values()
    shares = [mine / bare - 1 for mine, bare in zip(with_them, without, strict=True)]
    return median(without) / (RESNET_STEPS + 1), median(shares), quantiles(shares, n=4)[2]


def observers(terminal: Terminal, *, ledger: bool = False) -> Callable[[], Mapping[str, Hook]]:
    """Return the hooks of variant (b): progress, and the loss every 10 steps."""

    def hooks() -> dict[str, Hook]:
        found: dict[str, Hook] = {
            "console": ConsoleView(terminal),
            "metrics": Metrics(every_updates=10),
        }
        return found | {"ledger": LedgerHook()} if ledger else found

    return hooks


def variants(updates: int, folder: Path) -> dict[str, Trial]:
    """Return all variants by name."""
    lines = observers(Terminal(io.StringIO(), live=False))
    live = observers(Terminal(NullTerminal(), live=True))
    recorded = observers(Terminal(io.StringIO(), live=False), ledger=True)
    for name in ("hand", "lines", "live", "recorded"):
        (folder / name).mkdir()
    return {
        "bare loop": bare(updates),
        "(a) phasetrain, everything optional off": framework(PLAIN, updates),
        "(a) with the numerics guard": framework(GUARDED, updates),
        "(b) by hand": by_hand(updates, folder / "hand"),
        "(b) guard, progress as lines, loss log, accuracy, schedule": framework(
            FULL, updates, folder / "lines", lines
        ),
        "(b) with progress on a live terminal": framework(FULL, updates, folder / "live", live),
        "(b) with progress as lines and the ledger": framework(
            FULL, updates, folder / "recorded", recorded
        ),
    }


def measure(trials: Mapping[str, Trial], repetitions: int, updates: int) -> list[Row]:
    """Run the trials in turn and return their times; the first turn is a warm-up."""
    calls = {name: count_calls(trial) / updates for name, trial in trials.items()}
    taken: dict[str, list[Taken]] = {name: [] for name in trials}
    for turn in range(repetitions + 1):
        for name, trial in trials.items():
            gc.collect()
            found = trial()
            if turn:
                taken[name].append(Taken(found.cpu / updates * 1e6, found.wall / updates * 1e6))
    base = [time.cpu for time in next(iter(taken.values()))]
    return [row(name, times, base, calls[name]) for name, times in taken.items()]


def row(name: str, times: list[Taken], base: list[float], calls: float) -> Row:
    """Return the medians of one variant, in microseconds, relative to the bare loop."""
    cpu = [time.cpu for time in times]
    above = [mine - bare for mine, bare in zip(cpu, base, strict=True)]
    low, _, high = quantiles(above, n=4)
    ratio = median(mine / bare for mine, bare in zip(cpu, base, strict=True))
    wall = median(time.wall for time in times)
    return Row(name, wall, median(cpu), median(above), low, high, ratio, calls)


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'us per iteration':<58} {'wall':>6} {'cpu':>6} {'above bare':>11} {'(quartiles)':>14} "
        f"{'ratio':>6} {'calls':>6}"
    ]
    for row in rows:
        spread = f"{row.above_low:.1f} .. {row.above_high:.1f}"
        lines.append(
            f"{row.name:<58} {row.wall:6.1f} {row.cpu:6.1f} {row.above:>11.1f} {spread:>14} "
            f"{row.ratio:>6.2f} {row.calls:>6.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument(
        "--updates", type=int, default=500, help=f"per repetition, a multiple of {STEPS_PER_EPOCH}"
    )
    parser.add_argument(
        "--hooks",
        type=int,
        default=12,
        help="repetitions of the measurement of default hooks; 0: none",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    if flags.updates % STEPS_PER_EPOCH:
        parser.error(f"--updates {flags.updates}: expected a multiple of {STEPS_PER_EPOCH}")
    torch.set_num_threads(1)
    logging.getLogger("phasetrain").setLevel(
        logging.INFO
    )  # lines are made as in a run; nothing prints them
    logging.getLogger("phasetrain").addHandler(logging.NullHandler())
    logging.getLogger("phasetrain").propagate = False
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(variants(flags.updates, Path(folder)), flags.repetitions, flags.updates)
        print(table(rows))
        share = None
        if flags.hooks:
            step, share, high = share_of_hooks(default_hooks(Path(folder) / "resnet"), flags.hooks)
            print(
                f"all default hooks beside a step of resnet20 at batch {PICTURES} "
                f"({step * 1e3:.0f} ms): {100 * share:.2f} % more (highest quartile "
                f"{100 * high:.2f} %, aim below 5 %)"
            )
    if flags.json:
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.processor(),
        }
        content = {
            **about,
            "repetitions": flags.repetitions,
            "rows": [asdict(row) for row in rows],
            "hooks": share,
        }
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _settled(overrides: tuple[str, ...], updates: int) -> Setup:
    return resolve_config([*overrides, f"PHASES={{epochs: {updates // STEPS_PER_EPOCH}}}"])


if __name__ == "__main__":
    main()
