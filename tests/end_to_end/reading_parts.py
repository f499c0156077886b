"""Custom datasets, samplers, collate functions and loaders, which tests name by dotted path."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, default_collate

from phasetrain.data.datasets import load_digits
from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import make_shuffled


class Named:
    """Digits as mappings, each with a length."""

    def __init__(self, split: str = "train") -> None:
        self.samples = load_digits("train" if split == "train" else "test")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.samples[index]
        return {"image": image, "label": label, "index": index}

    def labels(self) -> Any:
        return self.samples.labels()

    def lengths(self) -> Any:
        return np.arange(len(self)) * 7 % 50


class JsonLines:
    """The samples of a file, an input and a target in each line."""

    def __init__(self, files: str) -> None:
        self.text = Path(files).read_text()
        self.rows = [json.loads(line) for line in self.text.splitlines()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.rows[index]["input"]), self.rows[index]["target"]

    def fingerprint(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Heavy:
    """Shuffled batches of one size, cut into forward passes that weigh at most `limit`; the weight
    of a pass is its number of samples times the heaviest one, as if they were padded."""

    splits = True
    WEIGHTS = np.arange(2000) * 37 % 100

    def __init__(self, batch_size: int, limit: int = 200) -> None:
        self.batch_size = batch_size
        self.limit = limit

    def __call__(self, length: int, seed: int) -> EpochOrder:
        return make_shuffled()(length, seed)

    def split(self, indices: Indices, most: int) -> list[int]:
        sizes = [0]
        heaviest = 0
        for weight in self.WEIGHTS[indices].tolist():
            heaviest = max(heaviest, weight)
            if sizes[-1] and (sizes[-1] == most or (sizes[-1] + 1) * heaviest > self.limit):
                sizes.append(0)
                heaviest = weight
            sizes[-1] += 1
        return sizes


class RarelyNoisy:
    """Digits of which a few get noise from one of the global generators."""

    def __init__(self, split: str = "train") -> None:
        self.samples = load_digits("train" if split == "train" else "test")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.samples[index]
        if index % 300 == 0:
            image = image + torch.rand(())
        if index % 300 == 1:
            image = image + float(np.random.standard_normal())
        if index % 300 == 2:
            image = image + random.random()
        return image, int(label)


class Backwards(Sampler[int]):
    """Samples in reverse order, rotated by an offset from torch's generator."""

    def __init__(self, data_source: Any, step: int = 1) -> None:
        self.length, self.step = len(data_source), step

    def __iter__(self) -> Iterator[int]:
        start = int(torch.randint(self.length, ()))
        return iter([(start - index * self.step) % self.length for index in range(self.length)])


class Counting(Backwards):
    """Yields a different order in each pass, with the same seed."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index + self.passes) % self.length for index in range(self.length)])


def as_batch(samples: Any, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Collate samples as a `collate_fn` of a torch DataLoader."""
    return torch.stack([sample[0] for sample in samples]) * scale, torch.tensor(
        [int(sample[1]) for sample in samples]
    )


def scaled_by(scale: float) -> Any:
    """Return a collate function with a parameter."""
    return lambda samples: as_batch(samples, scale)


class Sized:
    """A collate function as an object with `__call__`."""

    def __call__(self, samples: Any) -> tuple[Tensor, Tensor]:
        return as_batch(samples, 3.0)


class Stateful:
    """A custom loader that shuffles in each pass, augments from the global generator, and has a
    state."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int,
        rank: int = 0,
        processes: int = 1,
        *,
        forget: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.processes, self.forget = rank, processes, forget
        self.place, self.begin = 0, 0

    def __len__(self) -> int:
        return len(self.dataset) // (self.batch_size * self.processes)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.dataset), generator=generator)[self.rank :: self.processes]
        begin, self.begin = self.begin, 0
        for place in range(begin, len(self)):
            self.place = place + 1
            indices = order[place * self.batch_size : self.place * self.batch_size]
            inputs, targets = default_collate([self.dataset[int(index)] for index in indices])
            yield inputs + 0.1 * torch.randn(inputs.shape), targets

    def state_dict(self) -> dict[str, Any]:
        return {"place": 0 if self.forget else self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["place"]


class OfDataset(Stateful):
    """Reads the labels of the samples in use from the dataset itself."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = self.dataset
        chosen = torch.arange(len(samples)) if samples.chosen is None else samples.chosen
        labels = torch.as_tensor(samples.dataset.labels()[chosen])
        for place in range(self.begin, len(self)):
            part = slice(place * self.batch_size, (place + 1) * self.batch_size)
            yield torch.zeros(self.batch_size, 1, 8, 8), labels[part]


class Short(Stateful):
    """Yields fewer batches than its length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(super().__iter__())[:2])


class Uneven(Stateful):
    """Yields a batch with too few samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((inputs[:5], targets[:5]) for inputs, targets in super().__iter__())


class WithoutRank(Stateful):
    def __init__(self, dataset: Any, batch_size: int, seed: int) -> None:
        super().__init__(dataset, batch_size, seed)


class Lengthless:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


def one_too_far() -> Any:
    """Return an order whose indices start at 1 instead of 0."""
    return lambda length, seed: np.arange(1, length + 1)


class Shuffling(IterableDataset[Any]):
    """Digits in an order of Python's generator, with noise of torch's; no length."""

    def __init__(self, split: str = "train") -> None:
        self.samples = load_digits("train" if split == "train" else "test")

    def __iter__(self) -> Iterator[Any]:
        order = list(range(40))
        random.shuffle(order)
        for index in order:
            image, label = self.samples[index]
            yield image + 0.1 * torch.rand_like(image), label


class CountedShuffling(Shuffling):
    """The same with a length."""

    def __len__(self) -> int:
        return 40


class EndlessNumbers(Shuffling):
    """The same digits again and again."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


class Sharded(IterableDataset[Any]):
    """The digits of one rank, shuffled over all ranks; the last rank has fewer of them."""

    def __init__(self, rank: int = 0, processes: int = 1) -> None:
        self.samples = load_digits("train")
        self.rank = rank
        self.processes = processes

    def __iter__(self) -> Iterator[Any]:
        order = list(range(41))
        random.shuffle(order)
        for index in order[self.rank :: self.processes]:
            image, label = self.samples[index]
            yield image + 0.1 * torch.rand_like(image), label


class RankDependent:
    """Digits with indices that differ between ranks."""

    def __init__(self, rank: int = 0, processes: int = 1) -> None:
        self.samples = load_digits("train")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Unsized:
    """Digits at any index."""

    def __init__(self, split: str = "train") -> None:
        self.samples = load_digits("train" if split == "train" else "test")

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


class WrongLength(Named):
    """Samples with a length that is not a number of samples."""

    def __init__(self, length: float) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> Any:
        return self.length


def open_nothing() -> None:
    """A dataset factory that forgets to return."""


def open_generator() -> Iterator[Any]:
    """A dataset that can be read once."""
    return iter(Shuffling())


class OwnGenerator:
    """Digits with noise of a generator that nothing seeds again."""

    classes = 10

    def __init__(self, split: str = "train") -> None:
        self.samples = load_digits("train" if split == "train" else "test")
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        image, label = self.samples[index]
        return image + torch.from_numpy(self.random.random(image.shape, dtype=np.float32)), label
