"""Test splits that have samples of the training data are reported."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL, train
from torch.utils.data import Dataset, Subset, TensorDataset

import phasetrain
from phasetrain.addons.observe.trained_splits import warn_of_trained_splits
from phasetrain.testing.build import resolve_overrides


class Rows(Dataset[Any]):
    """Rows of numbers, without a fingerprint, so that a resume knows their number only."""

    classes = 2

    def __init__(self, seed: int = 0, samples: int = 16) -> None:
        self.rows = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index % 2


class Drawn(Rows):
    """Rows of random numbers, drawn one by one when the dataset is built."""

    def __init__(self, samples: int = 16) -> None:
        self.rows = torch.stack([torch.randn(4) for _ in range(samples)])


class DrawnForSplit(Drawn):
    """The same for a class that knows its split, and draws the same in each."""

    def __init__(self, split: str, samples: int = 16) -> None:
        super().__init__(samples)


class Divided(Rows):
    """A random half of the rows."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        order = np.random.permutation(16)
        self.rows = self.rows[order[8:] if second else order[:8]]


class DividedBySplit(Divided):
    """The same for a class that knows its split."""

    def __init__(self, split: str) -> None:
        super().__init__(split == "test")


class Numbers(Rows):
    """Each input is the index, for a task that makes the data."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(index), 0


class Noisy(Rows):
    """Draws each sample when it is read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4), 0


def make_tensors(samples: int = 16) -> TensorDataset:
    """Return the same rows as a dataset of torch."""
    return TensorDataset(Rows(samples=samples).rows, torch.arange(samples) % 2)


def list_counts(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """Return the numbers of samples in the warnings about a config."""
    data = resolve_overrides([*SMALL, "RUN.dir=x", *words]).builder().data()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_trained_splits(data)
    found = [re.match(r"DATA\.TEST: it has (\d+) samples", line) for line in caplog.messages]
    return [match[1] if match else "divides" for match in found]


def own(name: str, train: str = "", test: str = "") -> tuple[str, ...]:
    """Return the overrides for a dataset of this file with parameters of each split."""
    given = {"TRAIN": train, "TEST": test}
    return tuple(
        f"DATA.{key}={{{', '.join(filter(None, [f'dataset: {__name__}.{name}', words]))}}}"
        for key, words in given.items()
    )


def of_class(dataset: str) -> tuple[str, ...]:
    """Return the overrides for two parts of the digits, in train and test split."""
    return tuple(
        f"DATA.{name}={{dataset: {dataset}, begin: {begin}}}"
        for name, begin in (("TRAIN", 0), ("TEST", 500))
    )


REST = ("DATA.TEST.split=train", "DATA.TEST.subset={skip: 1000}")
"""Tests all samples of the train split but the first 1,000 of the shuffled list."""


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ((), []),
        (("DATA.TEST.split=train",), ["1442"]),
        (("DATA.TEST.split=train", "DATA.TRAIN.exclude=[0, 3, 5]"), ["1439"]),
        (("DATA.TEST.split=train", "DATA.TEST.subset.samples=20"), ["20"]),
        ((*REST, "DATA.TRAIN.subset.samples=1000"), []),
        ((*REST, "DATA.TRAIN.subset.samples=1010"), ["10"]),
        ((*REST, "DATA.TRAIN.subset.skip=1000", "DATA.TRAIN.exclude=[0, 9, 10]"), ["440"]),
        # Their fingerprints are their class, or the lengths of their shards.
        (of_class("stream_parts.Part"), []),
        (of_class("stream_parts.sharded_part"), []),
        (of_class("stream_parts.KnownPart"), ["64"]),  # as it says itself
        (own("Rows"), ["16"]),
        (own("Rows", test="seed: 1"), []),
        (own("Rows", test="samples: 16"), ["16"]),
        (own("Rows", test="subset: {samples: 4}"), ["4"]),
        (own("Rows", "subset: {samples: 10}", "subset: {skip: 10}"), []),
        (own("make_tensors"), ["16"]),
        (own("make_tensors", test="subset: {samples: 4}"), ["4"]),
        (own("make_tensors", "subset: {samples: 10}", "subset: {skip: 10}"), []),
        (own("Drawn", test="samples: 8"), []),
        (own("DrawnForSplit", test="samples: 8"), ["8"]),
        (own("Divided", "second: false", "second: true"), ["divides"]),
        (own("DividedBySplit"), []),
        (own("Numbers"), []),
        (own("Noisy"), []),
    ],
)
def test_samples_of_the_train_split_in_a_test_split_are_counted(
    words: tuple[str, ...], counts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert list_counts(caplog, *words) == counts


def test_test_with_the_samples_of_the_train_split_is_warned_of(tmp_path: Path) -> None:
    train(tmp_path, "PHASES.epochs=1", "DATA.TEST.split=train")
    assert "DATA.TEST: it has 1442 samples of DATA.TRAIN" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("trained", "tested", "count"),
    [(range(10), range(16), 10), (range(10), range(10, 16), 0), (range(16), range(8, 12), 4)],
)
def test_samples_that_two_subsets_of_torch_share_are_counted(
    tmp_path: Path, trained: range, tested: range, count: int
) -> None:
    rows = Rows()
    phasetrain.fit(
        torch.nn.Linear(4, 2),
        train=Subset(rows, list(trained)),
        test=Subset(rows, list(tested)),
        loss="cross_entropy",
        optimizer="sgd",
        epochs=1,
        batch_size=2,
        RUN={"dir": str(tmp_path)},
    )
    text = (tmp_path / "log.txt").read_text()
    assert re.findall(r"it has (\d+) samples of DATA.TRAIN", text) == [str(count)] * bool(count)
