"""Cost of the ledger in a real training: microseconds and bytes per update.

    python benchmarks/ledger.py [--repetitions 11] [--updates 300] [--json FILE]

Trainings with and without the hook `ledger` take turns in one process on one thread. The output
shows, per update, the time inside the hook (the median over updates, and the mean, which includes
the writes every 50 updates), and the difference of the whole training to one without it (median of
the differences within a repetition, CPU time). The hook runs between forward, backward and update,
so it sees the caches as a training leaves them.
"""

import argparse
import gc
import json
import logging
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from phasetrain.app.setup import resolve_config
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hook, Hooks, LedgerHook
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import FILE, HEADER_BYTES
from phasetrain.tasks import Builder

COMMON = (
    "DATA.TEST=null",
    "METERS=null",
    "MACHINE.threads=1",
    "OPTIMIZER.SCHEDULES=null",
    "OPTIMIZER.nesterov=false",
)
DIGITS = (*COMMON, "DATA.TRAIN.batch_size=64", "MODEL.name=mlp")
IMAGES = (
    *COMMON,
    "DATA.TRAIN={dataset: synthetic, samples: 512, input_shape: [3, 64, 64], classes: 10, "
    "batch_size: 256}",
    "DATA.TRAIN.transforms=[flatten]",
    "MODEL={name: torch.nn.Linear, in_features: 12288, out_features: 10}",
)


class Timed(LedgerHook):
    """A ledger that records the seconds spent in it per update."""

    def __init__(self, content: Any) -> None:
        super().__init__(content)
        self.seconds: list[float] = []
        self._spent = 0.0

    def on_batch(self, run: Any, phase: Phase, batch: Batch) -> None:
        began = time.perf_counter()
        super().on_batch(run, phase, batch)
        self._spent += time.perf_counter() - began

    def on_step(self, run: Any, phase: Phase, out: StepOutput) -> None:
        began = time.perf_counter()
        super().on_step(run, phase, out)
        self.seconds.append(self._spent + time.perf_counter() - began)
        self._spent = 0.0


@dataclass(frozen=True)
class Row:
    """Microseconds and bytes per update; `above` is None if only the hook was timed."""

    name: str
    median: float
    mean: float
    above: float | None
    size: float


class Training:
    """A training that can be repeated, with or without a ledger."""

    def __init__(self, overrides: tuple[str, ...], updates: int, folder: Path) -> None:
        words = [f"PHASES.updates={updates}", "PHASES.epochs=null", f"RUN.dir={folder}"]
        setup = resolve_config([*overrides, *words])
        builder = Builder(setup.config, setup.machine, setup.world)
        data = builder.data()
        self.plan = builder.plan(data)
        self.task = builder.task(builder.parts(data, self.plan))
        self.setup, self.folder, self.updates = setup, folder, updates
        folder.mkdir()

    def seconds(self, hook: Hook | None) -> float:
        """Train once and return the CPU time."""
        folder = RunFolder(str(self.folder))
        hooks = {} if hook is None else {"ledger": hook}
        engine = PhaseEngine(
            self.task, self.plan, RunState(), Hooks(hooks), folder=folder, world=self.setup.world
        )
        gc.collect()
        with self.setup.machine.apply_settings():
            began = time.process_time()
            engine.run()
            taken = time.process_time() - began
        folder.close()
        assert engine.state.updates == self.updates
        return taken


def measure(name: str, training: Training, content: str, repetitions: int, *, whole: bool) -> Row:
    """Return the cost of the ledger in a training; the first repetition is a warm-up."""
    spent, above = [], []
    for turn in range(repetitions + 1):
        hook = Timed(content)
        bare = training.seconds(None) if whole else 0.0
        plain = training.seconds(LedgerHook(content)) if whole else 0.0  # type: ignore[arg-type]
        training.seconds(hook)
        if turn:
            spent += hook.seconds
            above.append((plain - bare) / training.updates)
    size = (training.folder / FILE).stat().st_size - HEADER_BYTES
    more = median(above) * 1e6 if whole else None
    return Row(name, median(spent) * 1e6, mean(spent) * 1e6, more, size / training.updates)


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'per update':<56} {'in the hook, us':>16} {'mean':>7} {'whole, us':>10} {'bytes':>6}"
    ]
    for row in rows:
        above = "-" if row.above is None else f"{row.above:.1f}"
        lines.append(
            f"{row.name:<56} {row.median:>16.1f} {row.mean:>7.1f} {above:>10} {row.size:>6.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("phasetrain").setLevel(logging.WARNING)
    few = max(20, flags.updates // 10)
    with tempfile.TemporaryDirectory() as folder:
        digits = Training(DIGITS, flags.updates, Path(folder) / "digits")
        images = Training(IMAGES, few, Path(folder) / "images")
        rows = [
            measure("64 digits, sampled", digits, "sampled", flags.repetitions, whole=True),
            measure("64 digits, full", digits, "full", flags.repetitions, whole=True),
            measure("64 digits, none", digits, "none", flags.repetitions, whole=True),
            measure(
                "256 images of 3x64x64 floats, sampled",
                images,
                "sampled",
                flags.repetitions,
                whole=False,
            ),
            measure("256 images of 3x64x64 floats, full", images, "full", 2, whole=False),
        ]
    print(table(rows))
    if flags.json:
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.processor(),
        }
        content = {**about, "repetitions": flags.repetitions, "rows": [asdict(row) for row in rows]}
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
