"""Microseconds per sample of a custom dataset: phasetrain's loader against torch's DataLoader.

    python benchmarks/custom_dataset.py [--repetitions 15] [--samples 4096] [--batch 64]

The datasets are in memory and return one sample at a time, as most custom datasets do, so the
loaders cost more than the data. Both shuffle and stack the same samples, and take turns in one
process. The ratio is the median over the repetitions. Datasets that draw random numbers are seeded
for each sample, which a plain DataLoader does not do.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from phasetrain.commands.setup import resolve_config
from phasetrain.data import DATASETS
from phasetrain.data.loading.seed_check import check_seeded
from phasetrain.tasks import Builder
from phasetrain.tasks.build.data_builder import build_loader

SHAPE = (3, 16, 16)


class InMemory(Dataset[tuple[Tensor, int]]):
    """Samples in memory that are returned as they are.

    Args:
        samples: number of samples.
    """

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, *SHAPE, generator=generator)
        self.targets = torch.randint(10, (samples,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], self.targets[index]


class InLists(InMemory):
    """The same with torch's access to several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [
            (image, self.targets[index])
            for image, index in zip(self.inputs[indices].unbind(), indices, strict=True)
        ]


class Augmented(InMemory):
    """The same with a random flip."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, target = super().__getitem__(index)
        return (image.flip(-1) if random.random() < 0.5 else image), target


class Noisy(InMemory):
    """The same with noise from NumPy in one of a thousand samples."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, target = super().__getitem__(index)
        return (image + np.random.rand() if index % 1000 == 0 else image), target


KINDS: dict[str, type[InMemory]] = {
    "nothing drawn": InMemory,
    "nothing drawn, __getitems__": InLists,
    "rarely drawn": Noisy,
    "always drawn": Augmented,
}


def plain(kind: type[InMemory], samples: int, batch: int, workers: int) -> Callable[[], float]:
    """Return the seconds of a pass of torch's DataLoader."""
    loader = DataLoader(
        kind(samples),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def read() -> float:
        began = time.perf_counter()
        seen = sum(len(targets) for _, targets in loader)
        assert seen == samples
        return time.perf_counter() - began

    return read


def ours(kind: type[InMemory], samples: int, batch: int, workers: int) -> Callable[[], float]:
    """Return the seconds of the next pass of phasetrain's loader."""
    name = f"benchmark_{kind.__name__.lower()}"
    if name not in DATASETS:
        DATASETS.register(name)(kind)
    setup = resolve_config(
        [
            f"DATA.TRAIN={{dataset: {name}, samples: {samples}, batch_size: {batch}}}",
            f"DATA.TRAIN.workers={workers}",
            "DATA.TRAIN.transforms=[]",
            "DATA.TEST=null",
            "PHASES.epochs=1000",
            "METERS=null",
        ]
    )
    builder = Builder(setup.config, setup.machine, setup.world)
    data = builder.data()
    # As a run does before its first step.
    check_seeded(data["train"].reader, name)
    loader = build_loader(builder.context, data["train"], builder.plan(data))
    phases = iter(loader.plan.phases)

    def read() -> float:
        began = time.perf_counter()
        seen = sum(batch.size for step in loader.batches(next(phases)) for batch in step)
        assert seen == samples
        return time.perf_counter() - began

    return read


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'us per sample':<30} {'workers':>7} {'DataLoader':>11} {'phasetrain':>11} {'ratio':>6}"
    )
    for name, kind in KINDS.items():
        for workers in (0, 2):
            sizes = (flags.samples, flags.batch, workers)
            trials = (plain(kind, *sizes), ours(kind, *sizes))
            # The first pass starts the workers.
            times = [[trial() for trial in trials] for _ in range(flags.repetitions + 1)][1:]
            theirs, mine = (median(row) / flags.samples * 1e6 for row in zip(*times, strict=True))
            ratio = median(mine / theirs for theirs, mine in times)
            print(f"{name:<30} {workers:>7} {theirs:>11.1f} {mine:>11.1f} {ratio:>6.2f}")


if __name__ == "__main__":
    main()
