"""Cost of each tracker, compared with the same training without one.

    python benchmarks/trackers.py [--repetitions 20] [--updates 500] [--every 10] [--json FILE]

The training is the one in benchmarks/overhead.py. All variants take turns; the output shows medians
in microseconds per update. `above` is the median difference to the training without a tracker
within a repetition, including the tracker's own thread. `loop` is the wall time that the training
thread spends in the tracker's `on_step`. `end` is the time after the last step until a backend has
taken the rest, in seconds.
"""

import argparse
import gc
import importlib.util
import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from overhead import GUARDED, STEPS_PER_EPOCH, _settled

from phasetrain.addons.observe.trackers.csv import CSV
from phasetrain.addons.observe.trackers.mlflow import MLflow, create_database
from phasetrain.addons.observe.trackers.tensorboard import TensorBoard
from phasetrain.addons.observe.trackers.wandb import WandB
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hook, Hooks, Metrics
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Builder


@dataclass(frozen=True)
class Row:
    """Measurements of one tracker: microseconds per update, seconds at the end."""

    name: str
    wall: float
    above: float
    loop: float
    ratio: float
    end: float


class Timed:
    """A tracker whose events are timed by replacing the bound methods called by the engine."""

    def __init__(self, hook: Hook) -> None:
        self.hook, self.seconds = hook, 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added up."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def trial(name: str, make: Callable[[], Hook] | None, updates: int) -> tuple[float, float, float]:
    """Return seconds of the loop, in the tracker's events, and from the last step to the end."""
    setup = _settled(GUARDED, updates)
    builder = Builder(setup.config, setup.machine, setup.world)
    data = builder.data()
    plan = builder.plan(data)
    task = builder.task(builder.parts(data, plan))
    with tempfile.TemporaryDirectory() as folder:
        hooks = {} if make is None else {name: make()}
        engine = PhaseEngine(
            task, plan, RunState(), Hooks(hooks), folder=RunFolder(folder), world=setup.world
        )
        timed = Timed(Hook())
        events = engine.hooks
        events._step = [timed.timed(call) for call in events._step]
        marks: list[float] = []
        events._start = [*events._start, lambda run: marks.append(time.perf_counter())]
        events._end = [lambda run: marks.append(time.perf_counter()), *events._end]
        with setup.machine.apply_settings():
            engine.run()
        end = time.perf_counter() - marks[1]
    return marks[1] - marks[0], timed.seconds, end


def trackers(every: int, folder: Path) -> dict[str, Callable[[], Hook] | None]:
    """Return the available trackers by name; MLflow gets an existing database."""
    found: dict[str, Callable[[], Hook] | None] = {
        "none": None,
        "metrics": lambda: Metrics(every),
        "csv": lambda: CSV(every),
    }
    if importlib.util.find_spec("tensorboard"):
        found["tensorboard"] = lambda: TensorBoard(every)
    if importlib.util.find_spec("wandb"):
        found["wandb, offline, live"] = lambda: WandB(every_updates=every, live=True)
    if importlib.util.find_spec("mlflow"):
        base = folder / "mlflow.db"
        create_database(base)
        found["mlflow, sqlite, live"] = lambda: MLflow(
            f"sqlite:///{base}", every_updates=every, live=True, wait_seconds=60
        )
    return found


def measure(repetitions: int, updates: int, every: int, folder: Path) -> list[Row]:
    """Run all variants in turn; the first turn is a warm-up."""
    makers = trackers(every, folder)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in makers}
    for turn in range(repetitions + 1):
        for name, make in makers.items():
            gc.collect()
            found = trial(name, make, updates)
            if turn:
                taken[name].append(found)
    base = [wall for wall, _, _ in taken["none"]]
    rows = []
    for name, times in taken.items():
        walls = [wall for wall, _, _ in times]
        rows.append(
            Row(
                name,
                median(walls) / updates * 1e6,
                median(mine - bare for mine, bare in zip(walls, base, strict=True)) / updates * 1e6,
                median(inside for _, inside, _ in times) / updates * 1e6,
                median(mine / bare for mine, bare in zip(walls, base, strict=True)),
                median(end for _, _, end in times),
            )
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument(
        "--updates", type=int, default=500, help=f"per repetition, a multiple of {STEPS_PER_EPOCH}"
    )
    parser.add_argument(
        "--every", type=int, default=10, metavar="N", help="a record each N updates"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    if flags.updates % STEPS_PER_EPOCH:
        parser.error(f"--updates {flags.updates}: expected a multiple of {STEPS_PER_EPOCH}")
    torch.set_num_threads(1)
    logging.getLogger("phasetrain").propagate = False
    logging.getLogger("phasetrain").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(flags.repetitions, flags.updates, flags.every, Path(folder))
    print(
        f"{'us per update':<24} {'wall':>7} {'above none':>11} {'loop':>7} {'ratio':>6} "
        f"{'end (s)':>8}"
    )
    for row in rows:
        print(
            f"{row.name:<24} {row.wall:7.1f} {row.above:11.1f} {row.loop:7.1f} {row.ratio:6.2f} "
            f"{row.end:8.2f}"
        )
    if flags.json:
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.processor(),
        }
        content = {
            **about,
            "updates": flags.updates,
            "every": flags.every,
            "rows": [asdict(row) for row in rows],
        }
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
