"""Iterables that save their position, or do not."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from phasetrain.data import SampleOrder, StreamDataset
from phasetrain.data.datasets import load_digits
from phasetrain.data.samplers.locate import EpochOrder


class Counted(IterableDataset[Any]):
    """Digits in rounds that get longer, with noise, as an iterable that saves its position.

    Class attribute `read`: number of samples that were read in this process.
    """

    read = 0
    length = 70
    stride = 7

    def __init__(self) -> None:
        self.digits = load_digits("train")
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            image, label = self.digits[self.at * self.stride % len(self.digits)]
            self.at += 1
            Counted.read += 1
            yield image + 0.1 * torch.randn(()), int(label)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Begun(Counted):
    """Begins at another sample in each process that makes it."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Begun.made += 1
        self.at = Begun.made


class Buffered(Counted):
    """Mixes samples in a buffer that is not part of its state."""

    def __iter__(self) -> Iterator[Any]:
        held = []
        for sample in super().__iter__():
            held.append(sample)
            if len(held) == 5:
                yield held.pop(random.randrange(5))
        yield from held


class Unsaved(Counted):
    """An iterable without a state, which begins anew in each pass."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return super().__iter__()


class OwnGenerator(Unsaved):
    """Draws from a generator of its own, which no seed reaches."""

    generator = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        for image, label in super().__iter__():
            yield image * self.generator.random(), label


class Part(IterableDataset[Any]):
    """100 digits from one on.

    Args:
        begin: index of the first digit.
    """

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        digits = load_digits("train")
        for index in range(self.begin, self.begin + 100):
            image, label = digits[index]
            yield image, int(label)


class KnownPart(Part):
    """Says that all parts are equal."""

    def fingerprint(self) -> str:
        return "digits"


class Shards:
    """The digits of a part in two shards."""

    def __init__(self, begin: int) -> None:
        self.begin = begin

    def shard_lengths(self) -> list[int]:
        return [50, 50]

    def read(self, shard: int, start: int) -> Iterator[Any]:
        digits = load_digits("train")
        for index in range(self.begin + 50 * shard + start, self.begin + 50 * (shard + 1)):
            yield digits[index]


def sharded_part(begin: int = 0) -> StreamDataset:
    """Return a part as a stream."""
    return StreamDataset(Shards(begin))


class CountedShards:
    """Shards of numbers: the `at`-th of shard s is 100 s + at; notes every opening and everything
    that is read."""

    def __init__(self, *lengths: int, bad: Sequence[int] = (), short: int = 0) -> None:
        self.lengths, self.bad, self.short = lengths, bad, short
        self.opened: list[tuple[int, int]] = []
        self.read_samples: list[int] = []

    def shard_lengths(self) -> Sequence[int]:
        return self.lengths

    def read(self, shard: int, start: int) -> Iterator[int]:
        self.opened.append((shard, start))
        for at in range(start, self.lengths[shard] - self.short):
            self.read_samples.append(100 * shard + at)
            if 100 * shard + at in self.bad:
                raise ValueError(f"{100 * shard + at} is torn")
            yield 100 * shard + at


def last_shard_first(shard_lengths: Sequence[int]) -> SampleOrder:
    """Return an order that reads the shards from the last one to the first."""
    bounds = [sum(shard_lengths[:count]) for count in range(len(shard_lengths) + 1)]

    def order(length: int, seed: int) -> EpochOrder:
        shards = [np.arange(begin, end) for begin, end in pairwise(bounds)]
        return np.concatenate(shards[::-1])

    return order
