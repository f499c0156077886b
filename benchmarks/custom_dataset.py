"""Microseconds per sample of a custom dataset: phasetrain's loader against torch's DataLoader.

    python benchmarks/custom_dataset.py [--repetitions 15] [--samples 4096] [--batch 64]

The datasets are in memory and return one sample at a time, as most custom datasets do, so the
loaders cost more than the data. Both shuffle and stack the same samples, and take turns in one
process. The ratio is the median over the repetitions, next to its quartiles. Without workers it is
the ratio of CPU times, which other programs disturb less. Datasets that draw random numbers are
seeded for each sample, which a plain DataLoader does not do.

The last lines show what `normalize` costs on a batch of 32 images of 3x32x32, as the reader applies
it to samples that it has stacked, compared with the same transform for each sample.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from phasetrain.app.setup import resolve_config
from phasetrain.data import DATASETS
from phasetrain.data.loading.seed_check import check_seeded
from phasetrain.data.transforms import TRANSFORMS
from phasetrain.data.transforms.base import Keys, Pipeline
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


class AugmentedByTorch(InMemory):
    """The same with a random flip from torch's generator, as torchvision draws it."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, target = super().__getitem__(index)
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), target


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
    "always drawn, by torch": AugmentedByTorch,
}


def read_clock(workers: int) -> float:
    """Return the time in seconds: CPU time of this process, or of the wall if workers read."""
    if workers:
        return time.perf_counter()
    return time.process_time()


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
        began = read_clock(workers)
        seen = sum(len(targets) for _, targets in loader)
        assert seen == samples
        return read_clock(workers) - began

    return read


@contextmanager
def ours(
    kind: type[InMemory], samples: int, batch: int, workers: int
) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds of the next pass of phasetrain's loader."""
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
        began = read_clock(workers)
        seen = sum(batch.size for step in loader.batches(next(phases)) for batch in step)
        assert seen == samples
        return read_clock(workers) - began

    yield read
    # Workers live until the loader is closed, and would keep this process from exiting.
    loader.close()


def normalize(repetitions: int) -> tuple[float, float, bool]:
    """Return the seconds of `normalize` on 32 samples one by one and stacked, and whether the bits
    are equal."""
    inputs = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    pipeline = Pipeline([TRANSFORMS.build("normalize", {"mean": [0.3], "std": [0.7]})])
    samples = list(inputs)
    keys = Keys(np.arange(len(samples)))
    single: list[float] = []
    stacked: list[float] = []
    for _ in range(20 * repetitions):
        began = time.process_time()
        one_by_one = torch.stack(
            [pipeline.transform_sample(image, keys.select(at)) for at, image in enumerate(samples)]
        )
        single.append(time.process_time() - began)
        began = time.process_time()
        together = pipeline(torch.stack(samples), keys)
        stacked.append(time.process_time() - began)
    return median(single), median(stacked), torch.equal(one_by_one, together)


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
        f" {'(quartiles)':>14}"
    )
    for name, kind in KINDS.items():
        for workers in (0, 2):
            sizes = (flags.samples, flags.batch, workers)
            with ours(kind, *sizes) as mine:
                trials = (plain(kind, *sizes), mine)
                # The first pass starts the workers.
                times = [[trial() for trial in trials] for _ in range(flags.repetitions + 1)][1:]
            medians = [median(row) / flags.samples * 1e6 for row in zip(*times, strict=True)]
            low, ratio, high = quantiles([own / plain for plain, own in times], n=4)
            print(
                f"{name:<30} {workers:>7} {medians[0]:>11.1f} {medians[1]:>11.1f} {ratio:>6.2f}"
                f" {f'{low:.2f} .. {high:.2f}':>14}",
                flush=True,
            )
    single, stacked, is_equal = normalize(flags.repetitions)
    print(
        f"normalize on 32 images, one by one / stacked: {single / stacked:.1f}, equal bits: "
        f"{is_equal}"
    )


if __name__ == "__main__":
    main()
