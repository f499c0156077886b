"""Time to the first batch in the middle of an epoch, and time per step from there.

    python benchmarks/seek.py [--repetitions 15] [--steps 2000] [--json FILE]

A resumed run has to seek: it creates a `PhaseSampler` and asks for the middle step of a shuffled
pass in batches of 256. Up to 2**20 samples a pass is a table computed at once (NumPy's Philox
generator), above that a function of the index. For comparison: `torch.randperm` with the same
length, if it takes seconds at most. The two take turns; the output shows medians and the slowest
seek. The mean per step includes values computed ahead in chunks; the slowest step computes a chunk.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from phasetrain.data.samplers.phase_sampler import SAMPLERS, Draw, PhaseSampler
from phasetrain.distributed import World
from phasetrain.engine.plan import Phase

LENGTHS = (10**6, 1_281_167, 10**7, 10**9, 2**30 + 1)
"""Samples of a pass; 1,281,167 are those of ImageNet, and 2**30 + 1 is the worst case of the
network near 10**9."""
LONGEST_TABLE = 10**7
BATCH = 256


@dataclass(frozen=True)
class Figures:
    """Measurements for one length in milliseconds, except the mean step."""

    samples: int
    seek_ms: float
    slowest_seek_ms: float
    randperm_ms: float | None
    step_us: float
    slowest_step_ms: float


def milliseconds_since(begin: int) -> float:
    """Return the milliseconds since a reading of `time.perf_counter_ns`."""
    return (time.perf_counter_ns() - begin) / 1e6


def draws(samples: int, seed: int) -> Iterator[list[Draw]]:
    """Return the steps of a pass from its middle, using a fresh sampler."""
    sampler = PhaseSampler(
        SAMPLERS["shuffled"](), samples, seed=seed, micro_batch_size=BATCH, world=World()
    )
    steps = samples // BATCH
    phase = Phase(0, "train", 0, first=0, steps=steps, offset=0, end=samples, batch_size=BATCH)
    return sampler.steps(phase, steps // 2)


def seek(samples: int, seed: int) -> float:
    """Return the milliseconds to the first batch."""
    begin = time.perf_counter_ns()
    next(draws(samples, seed))
    return milliseconds_since(begin)


def randperm(samples: int, seed: int) -> float:
    """Return the milliseconds to the same position with `torch.randperm`."""
    generator = torch.Generator().manual_seed(seed)
    begin = time.perf_counter_ns()
    order = torch.randperm(samples, generator=generator)
    order[samples // 2 : samples // 2 + BATCH].numpy()
    return milliseconds_since(begin)


def step_times(samples: int, seed: int, count: int) -> list[float]:
    """Return the milliseconds of each of `count` steps after a seek."""
    going = draws(samples, seed)
    next(going)
    taken = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        next(going)
        taken.append(milliseconds_since(begin))
    return taken


def measure(samples: int, repetitions: int, count: int) -> Figures:
    """Measure one length; the first turn is a warm-up."""
    seeks, tables = [], []
    for turn in range(repetitions + 1):
        seeks.append(seek(samples, turn))
        if samples <= LONGEST_TABLE:
            tables.append(randperm(samples, turn))
    steps = step_times(samples, 0, min(count, samples // BATCH // 2 - 1))
    return Figures(
        samples,
        median(seeks[1:]),
        max(seeks[1:]),
        median(tables[1:]) if tables else None,
        1000 * sum(steps) / len(steps),
        max(steps),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(samples, flags.repetitions, flags.steps) for samples in LENGTHS]
    print(
        f"steps of {BATCH} samples from the middle of a shuffled pass, medians of "
        f"{flags.repetitions}"
    )
    print(
        f"{'samples':>13} {'seek ms':>9} {'slowest':>9} {'randperm ms':>12} {'step us':>9} "
        f"{'slowest ms':>11}"
    )
    for row in found:
        table = "-" if row.randperm_ms is None else f"{row.randperm_ms:.2f}"
        print(
            f"{row.samples:>13,} {row.seek_ms:>9.2f} {row.slowest_seek_ms:>9.2f} {table:>12} "
            f"{row.step_us:>9.1f} {row.slowest_step_ms:>11.2f}"
        )
    if flags.json:
        versions = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
        }
        content = {**versions, "batch": BATCH, "figures": [asdict(row) for row in found]}
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
