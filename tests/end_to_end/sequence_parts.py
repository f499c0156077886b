"""Parts of runs of sequence-to-sequence models and of iterables that save their position."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from phasetrain.addons.text.models import Seq2SeqGRU, Seq2SeqTransformer
from phasetrain.addons.text.sequence_to_sequence import SequenceToSequence
from phasetrain.addons.text.sequences import TokenPairs
from phasetrain.data import DATASETS
from phasetrain.data.datasets import load_digits
from phasetrain.engine.batch import Batch
from phasetrain.models import MODELS
from phasetrain.tasks import TASKS


@DATASETS.register("reversed_tokens")
def reversed_tokens(split: str = "train", samples: int = 45) -> TokenPairs:
    """Sources of 1 to 9 tokens, whose target is the source backwards; in tests every third one may
    also be written forwards."""
    generator = random.Random(7 if split == "train" else 8)
    sources = [
        [generator.randrange(1, 6) for _ in range(generator.randint(1, 9))] for _ in range(samples)
    ]
    targets = [[*reversed(source), 0] for source in sources]
    if split != "train":
        targets = [
            target if at % 3 else [*target, *source, 0]
            for at, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
    return TokenPairs(sources, targets, source_vocabulary=6, target_vocabulary=6)


@MODELS.register("double_gru")
def double_gru(source_vocabulary: int, target_vocabulary: int) -> nn.Module:
    return Seq2SeqGRU(source_vocabulary, target_vocabulary, width=8).double()


@MODELS.register("double_seq2seq")
def double_seq2seq(source_vocabulary: int, target_vocabulary: int) -> nn.Module:
    return Seq2SeqTransformer(
        source_vocabulary, target_vocabulary, width=8, depth=1, heads=2, dropout=0.0
    ).double()


@TASKS.register("pairs_by_samples")
class PairsBySamples(SequenceToSequence):
    """Weights micro-batches by samples instead of target tokens."""

    def weight_of(self, batch: Batch) -> int:
        return batch.size


class Counted(IterableDataset[Any]):
    """Digits in rounds that get longer, with noise, as an iterable that saves its position.

    Class attribute `read`: number of samples that were read in this process.
    """

    read = 0
    length = 70

    def __init__(self) -> None:
        self.digits = load_digits("train")
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            image, label = self.digits[self.at * 7 % len(self.digits)]
            self.at += 1
            Counted.read += 1
            yield image + 0.1 * torch.randn(()), int(label)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


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
