"""Cost of each profiling hook, compared with the same training without one.

    python benchmarks/profiling.py [--repetitions 20] [--updates 500] [--json FILE]

The training is the one in benchmarks/overhead.py with progress lines, loss log and ledger. The
hooks have their default settings. All variants take turns; the output shows medians of CPU time in
microseconds per update, from the start of the first phase to the end of the last. `above` is the
median difference to the training without a profiling hook within a repetition, `ratio` the median
quotient; the wall clock is shown as well.
"""

import argparse
import gc
import io
import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from overhead import FULL, STEPS_PER_EPOCH, _settled, observers

from phasetrain.addons.observe.profiling.activations import Activations
from phasetrain.addons.observe.profiling.breakdown import Breakdown
from phasetrain.addons.observe.profiling.memory import Memory
from phasetrain.addons.observe.profiling.profiler import Profiler
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hook, Hooks
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder


@dataclass(frozen=True)
class Row:
    """Microseconds per update with one hook."""

    name: str
    wall: float
    cpu: float
    above: float
    ratio: float


class Stopwatch(Hook):
    """Measures the seconds from the first phase to the end of the last: wall clock and CPU."""

    def __init__(self) -> None:
        self.began = self.ended = (0.0, 0.0)

    def on_phase_start(self, run: Any, phase: Any) -> None:
        """Start the clock once."""
        if not self.began[0]:
            self.began = time.perf_counter(), time.process_time()

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        """Record the time."""
        self.ended = time.perf_counter(), time.process_time()


def quiet() -> Terminal:
    """Return an invisible terminal."""
    return Terminal(io.StringIO(), live=False)


def profilers() -> dict[str, Callable[[], Mapping[str, Hook]]]:
    """Return the hook factories of each variant, by name."""
    return {
        "none": dict,
        "breakdown": lambda: {"breakdown": Breakdown(quiet())},
        "memory": lambda: {"memory": Memory(quiet())},
        "activations": lambda: {"activations": Activations()},
        "profiler, while it waits": lambda: {"profiler": Profiler(quiet(), wait=1_000_000)},
    }


def trial(make: Callable[[], Mapping[str, Hook]], updates: int) -> tuple[float, float]:
    """Return the seconds of a training: wall clock and CPU."""
    setup = _settled(FULL, updates)
    builder = Builder(setup.config, setup.machine, setup.world)
    data = builder.data()
    plan = builder.plan(data)
    task = builder.task(builder.parts(data, plan))
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        hooks = {**observers(quiet(), ledger=True)(), **make(), "stopwatch": watch}
        engine = PhaseEngine(
            task, plan, RunState(), Hooks(hooks), folder=RunFolder(folder), world=setup.world
        )
        with setup.machine.apply_settings():
            engine.run()
    return watch.ended[0] - watch.began[0], watch.ended[1] - watch.began[1]


def measure(repetitions: int, updates: int) -> list[Row]:
    """Run all variants in turn; the first turn is a warm-up."""
    makers = profilers()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for turn in range(repetitions + 1):
        for name, make in makers.items():
            gc.collect()
            wall, cpu = trial(make, updates)
            if turn:
                taken[name].append((wall / updates * 1e6, cpu / updates * 1e6))
    base = [cpu for _, cpu in taken["none"]]
    return [
        Row(
            name,
            median(wall for wall, _ in times),
            median(cpu for _, cpu in times),
            median(cpu - bare for (_, cpu), bare in zip(times, base, strict=True)),
            median(cpu / bare for (_, cpu), bare in zip(times, base, strict=True)),
        )
        for name, times in taken.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument(
        "--updates", type=int, default=500, help=f"per repetition, a multiple of {STEPS_PER_EPOCH}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    if flags.updates % STEPS_PER_EPOCH:
        parser.error(f"--updates {flags.updates}: expected a multiple of {STEPS_PER_EPOCH}")
    torch.set_num_threads(1)
    logging.getLogger("phasetrain").propagate = False
    logging.getLogger("phasetrain").addHandler(logging.NullHandler())
    rows = measure(flags.repetitions, flags.updates)
    print(f"{'us per update':<24} {'wall':>7} {'cpu':>7} {'above none':>11} {'ratio':>6}")
    for row in rows:
        print(f"{row.name:<24} {row.wall:7.1f} {row.cpu:7.1f} {row.above:11.1f} {row.ratio:6.2f}")
    if flags.json:
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.processor(),
        }
        content = {**about, "updates": flags.updates, "rows": [asdict(row) for row in rows]}
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
